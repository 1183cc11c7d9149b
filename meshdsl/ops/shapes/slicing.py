"""Operations on positions of one dim: slice, index, pad, flip, shift, diff.

Nearly all of them are one primitive, the *window*: position p of the result has element
(start + p * stride) / dilation of x where that is a whole number inside of x, and a constant
elsewhere; or, wrapped, that element modulo the size. The gradient of a window is a window, with
stride and dilation exchanged.
"""

from __future__ import annotations

import builtins
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from meshdsl.ops.creation import arange, as_tensor
from meshdsl.ops.elementwise.arithmetic import add, cast, clip, remainder, where
from meshdsl.ops.elementwise.broadcasting import outer
from meshdsl.ops.indexing import overwrite, take
from meshdsl.ops.operation import operation
from meshdsl.ops.shapes.shape import broadcast
from meshdsl.tensors.dims import Dimension, DimLike, DimsLike, Shape, unused
from meshdsl.tensors.dtypes import is_float, is_integer, short
from meshdsl.tensors.idioms import refuse
from meshdsl.tensors.tensor import Tensor
from meshdsl.tracing.graph import Aval, Operation, Primitive, Work
from meshdsl.tracing.trace import bind_one


def _window_rule(inputs: Sequence[Tensor], params: Mapping[str, Any]) -> list[Aval]:
    (x,) = inputs
    dim = Dimension(params["dim"], params["size"])
    return [(Shape(dim if d.name == dim.name else d for d in x.shape), x.dtype)]


def _window_gradient(op: Operation, cotangents: Sequence, wanted: Sequence[bool]) -> list[Tensor]:
    """Solves q = (start + p * stride) / dilation for p."""
    params, size = op.params, op.inputs[0].shape.get(op.params["dim"]).size
    sign = 1 if params["stride"] > 0 else -1
    back = {
        "start": -sign * params["start"],
        "stride": sign * params["dilation"],
        "dilation": sign * params["stride"],
        "wrap": params["wrap"],
    }
    return [window(cotangents[0], params["dim"], size=size, **back)]


def _index_rule(inputs: Sequence[Tensor], params: Mapping[str, Any]) -> list[Aval]:
    return [(inputs[0].shape.without([params["dim"]]), inputs[0].dtype)]


def _index_gradient(op: Operation, cotangents: Sequence, wanted: Sequence[bool]) -> list[Tensor]:
    (x,), (dim, at) = op.inputs, (op.params["dim"], op.params["at"])
    there = arange(x.shape.get(dim)) == at
    return [where(there, cotangents[0].broadcast(x.shape), 0)]


def _unfilled(op: Operation) -> tuple[int, ...]:
    """Returns the operand of a window if that reads no number but zero outside of it."""
    (x,), (out,), params = op.inputs, op.outputs, op.params
    last = params["start"] + (out.shape.get(params["dim"]).size - 1) * params["stride"]
    ends = params["start"], last
    inside = min(ends) >= 0 and max(ends) < x.shape.get(params["dim"]).size
    return (0,) if not params["fill"] or (inside and params["dilation"] == 1) else ()


WINDOW = Primitive(
    "window",
    _window_rule,
    _window_gradient,
    work=Work.NONE,
    positionwise=True,
    linear=_unfilled,
)
INDEX = Primitive(
    "index", _index_rule, _index_gradient, work=Work.NONE, positionwise=True, linear=(0,)
)


def window(
    x: Tensor,
    dim: str,
    start: int,
    size: int,
    stride: int = 1,
    dilation: int = 1,
    fill: float | bool = 0,
    wrap: bool = False,
) -> Tensor:
    """Returns element (start + p * stride) / dilation of x at each position p of `dim`, or `fill`.

    With `wrap`, which needs x's own size and neither stride nor dilation, the elements beyond one
    end are those from the other.
    """
    if (start, size, stride, dilation) == (0, x.shape.get(dim).size, 1, 1):
        return x
    params = {"dim": dim, "start": start, "size": size, "stride": stride, "dilation": dilation}
    return bind_one(WINDOW, (x,), {**params, "fill": fill, "wrap": wrap})


@operation
def slice(
    x: Tensor, dim: DimLike, start: int | None = None, stop: int | None = None, step: int = 1
) -> Tensor:
    """Returns a part of a dim, as Python slices: `md.slice(x, "length", 1, -1)`.

    `x["length", 1:-1]` is the same. Negative positions count from the end, positions beyond an end
    mean that end, and a negative step goes backwards. A dim cannot be empty: a slice of nothing is
    an error.

    Raises:
        ValueError: nothing is left, or a position is a tensor, which `md.dynamic_slice` takes.

    Examples:
        >>> x = md.named([1, 2, 3, 4], ["length"])
        >>> print(md.slice(x, "length", 1, -1), x["length", ::2])
        s32[length=2] [2 3] s32[length=2] [1 3]
    """
    along = x.shape.get(dim)
    _whole(start, stop, step, instead="md.dynamic_slice")
    chosen = range(*builtins.slice(start, stop, step).indices(along.size))
    if not chosen:
        asked = ":".join("" if v is None else str(v) for v in (start, stop, step))
        raise ValueError(f"[{asked}] holds nothing of {along}, and a dim cannot be empty")
    return window(x, along.name, chosen.start, len(chosen), chosen.step)


@operation
def index(x: Tensor, dim: DimLike, at: int) -> Tensor:
    """Returns x at one position of a dim, without that dim: `md.index(x, "length", -1)`.

    `x["length", -1]` is the same. Negative positions count from the end; one outside of the dim is
    an error. For positions that are tensors there is `md.take`.

    Raises:
        ValueError: the position is outside of the dim, or a tensor.

    Examples:
        >>> x = md.named([[1, 2, 3], [4, 5, 6]], ["batch", "length"])
        >>> print(md.index(x, "length", -1))
        s32[batch=2] [3 6]
        >>> print(x["batch", 0])
        s32[length=3] [1 2 3]
    """
    along = x.shape.get(dim)
    _whole(at, instead="md.take")
    if not -along.size <= at < along.size:
        raise ValueError(f"position {at} is outside of {along}")
    return bind_one(INDEX, (x,), {"dim": along.name, "at": int(at) % along.size})


@operation
def pad(
    x: Tensor,
    dim: DimLike,
    low: int = 0,
    high: int = 0,
    value: float | bool = 0,
    mode: str = "constant",
    interior: int = 0,
) -> Tensor:
    """Returns x with elements added at the ends of a dim: `md.pad(x, "height", 1, 1)`.

    Args:
        low, high: how many to add before the first and after the last element; negative ones
            remove elements.
        value: of the added elements, in the mode "constant".
        mode: "constant", or as `numpy.pad`: "edge" repeats the outermost element, "reflect"
            mirrors at it, "symmetric" mirrors beyond it, "wrap" goes on at the other end.
        interior: how many to add between every two elements as well, in the mode "constant".

    Raises:
        ValueError: nothing would be left, the mode is unknown, `interior` is negative, or x's dtype
            does not hold `value`. In the other modes: `value` or `interior` is given, or `low` or
            `high` is negative, or more than x has elements for.

    Examples:
        >>> x = md.named([1, 2, 3], ["width"])
        >>> print(md.pad(x, "width", 1, 2))
        s32[width=6] [0 1 2 3 0 0]
        >>> print(md.pad(x, "width", 2, mode="reflect"))
        s32[width=5] [3 2 1 2 3]
    """
    along = x.shape.get(dim)
    if interior < 0:
        raise ValueError(f"interior must be 0 or more, got {interior}")
    size = low + (along.size - 1) * (interior + 1) + 1 + high
    if size < 1:
        raise ValueError(f"taking {-low} and {-high} away leaves nothing of {along}")
    if mode == "constant":
        fill = _number(value, x.dtype)
        return window(x, along.name, -low, size, dilation=interior + 1, fill=fill)
    if mode not in _REACH:
        known = ", ".join(map(repr, ["constant", *_REACH]))
        raise ValueError(f"the mode is one of {known}, not {mode!r}")
    if interior or value != 0:
        raise ValueError(f"value and interior belong to the mode 'constant', not to {mode!r}")
    most = along.size + _REACH[mode]
    if min(low, high) < 0 or (mode != "edge" and max(low, high) > most):
        limit = "" if mode == "edge" else f" to {most}"
        raise ValueError(
            f"in the mode {mode!r} {along} can be padded by 0{limit or ' or more'}, "
            f"not by {low} and {high}"
        )
    return _continued(x, along, low, size, mode)


# By mode: how many elements beyond the dim's size can be added.
_REACH = {"edge": 0, "reflect": -1, "symmetric": 0, "wrap": 0}


def _continued(x: Tensor, dim: Dimension, low: int, size: int, mode: str) -> Tensor:
    """Pads with elements of x itself: one window in the middle, one on each side."""
    middle = window(x, dim.name, -low, size)
    outside: tuple[Tensor, Tensor]
    if mode == "edge":
        outside = (index(x, dim, 0), index(x, dim, -1))
    elif mode == "wrap":
        starts = (dim.size - low, -low - dim.size)
        outside = (window(x, dim.name, starts[0], size), window(x, dim.name, starts[1], size))
    else:
        between = 0 if mode == "reflect" else 1  # whether the outermost element is repeated
        starts = (low - between, low + 2 * dim.size - 2 + between)
        outside = (
            window(x, dim.name, starts[0], size, stride=-1),
            window(x, dim.name, starts[1], size, stride=-1),
        )
    position = arange(Dimension(dim.name, size))
    result = middle
    if low:
        result = where(position < low, outside[0], result)
    if size > low + dim.size:
        result = where(position >= low + dim.size, outside[1], result)
    return result.transpose(middle.shape.names)


def _number(value: Any, dtype: np.dtype) -> float | bool:
    """Returns a constant as a number that `dtype` holds; errors as for operands."""
    if isinstance(value, Tensor):
        raise ValueError(f"the value must be a number, got {value!r}")
    number = value.item() if isinstance(value, np.generic) else value
    if dtype == np.bool_ and number == 0:  # the default
        number = False
    as_tensor(number, dtype)  # raises as for an operand
    return float(number) if is_float(dtype) else number


@operation
def flip(x: Tensor, over: DimsLike) -> Tensor:
    """Returns x with the elements of some dims in reverse order: `md.flip(x, "width")`.

    Examples:
        >>> x = md.named([[1, 2, 3], [4, 5, 6]], ["height", "width"])
        >>> print(md.flip(x, "width"))
        s32[height=2, width=3] [[3 2 1]
         [6 5 4]]
    """
    for dim in x.shape.select(over):
        x = window(x, dim.name, dim.size - 1, dim.size, stride=-1)
    return x


@operation
def shift(x: Tensor, dim: DimLike, by: Any, wrap: bool = False) -> Tensor:
    """Returns x moved along a dim: element i goes to i + by.

    Args:
        by: a whole number, or an integer tensor without dims.
        wrap: elements that leave at one end enter at the other; otherwise zeros enter.

    Raises:
        ValueError: `by` is a tensor that has dims or no integers.

    Examples:
        >>> tokens = md.named([1, 2, 3, 4], ["length"])
        >>> print(md.shift(tokens, "length", 1))
        s32[length=4] [0 1 2 3]
        >>> print(md.shift(tokens, "length", -1, wrap=True))
        s32[length=4] [2 3 4 1]
    """
    along = x.shape.get(dim)
    if isinstance(by, int | np.integer):
        by = int(by)
        if wrap:
            start = -by % along.size
            return window(x, along.name, start, along.size, wrap=True) if start else x
        return window(x, along.name, max(-along.size, min(along.size, -by)), along.size)
    source = arange(along) - _scalar(by, "by")
    if wrap:
        source = remainder(source, along.size)
    rest, spare = _apart(x, along)
    return take(rest, source, spare).transpose(x.shape.names)


@operation
def diff(x: Tensor, dim: DimLike) -> Tensor:
    """Returns the differences of neighbours along a dim, which becomes one shorter.

    `md.diff(heights, "length")`: element i + 1 minus element i.

    Raises:
        ValueError: the dim has a single element, or x is bool.

    Examples:
        >>> heights = md.named([1, 4, 9, 16], ["length"])
        >>> print(md.diff(heights, "length"))
        s32[length=3] [3 5 7]
    """
    along = x.shape.get(dim)
    if along.size == 1:
        raise ValueError(f"{along} has no neighbours")
    return window(x, along.name, 1, along.size - 1) - window(x, along.name, 0, along.size - 1)


@operation
def dynamic_slice(x: Tensor, dim: DimLike, start: Any, size: int) -> Tensor:
    """Returns `size` positions of a dim from `start` on: `md.dynamic_slice(x, "length", at, 4)`.

    Args:
        start: an integer tensor, or a number. It is limited to [0, dim - size], so that the slice
            lies inside the dim, as XLA limits it. Its dims, which x must lack, lead the result.

    Raises:
        ValueError: `size` is not from 1 to that of the dim, or `start` has no integers, or a dim
            that x has too.

    Examples:
        >>> x = md.named([1, 2, 3, 4, 5, 6], ["length"])
        >>> print(md.dynamic_slice(x, "length", 2, 3))
        s32[length=3] [3 4 5]
        >>> print(md.dynamic_slice(x, "length", md.named([0, 9], ["batch"]), 3))
        s32[batch=2, length=3] [[1 2 3]
         [4 5 6]]
    """
    along = x.shape.get(dim)
    if not 0 < size <= along.size:
        raise ValueError(f"a slice of {along} has 1 to {along.size} positions, not {size}")
    if isinstance(start, int | np.integer):
        return window(x, along.name, max(0, min(int(start), along.size - size)), size)
    first = clip(_integers(start, "start"), 0, along.size - size)
    part = Dimension(unused(along.name, x.shape, first.shape), size)
    result = take(x, outer(add, first, arange(part)), along.name)
    return result.rename({part.name: along.name}).transpose([*first.shape.names, *x.shape.names])


@operation
def dynamic_update_slice(x: Tensor, update: Tensor, dim: DimLike, start: Any) -> Tensor:
    """Returns x with the positions of a dim from `start` on replaced by those of `update`.

    Args:
        update: as x, but shorter along `dim`. It is broadcast along dims that it lacks.
        start: an integer tensor without dims, or a number; limited to [0, x's dim - update's], so
            that the update lies inside of x, as XLA limits it.

    Raises:
        ValueError: the update has a dim that x lacks, or is longer than x or of another dtype; or
            `start` is a tensor that has dims or no integers.

    Examples:
        >>> cache = md.named([0, 0, 0, 0, 0], ["length"])
        >>> print(md.dynamic_update_slice(cache, md.named([1, 2], ["length"]), "length", 2))
        s32[length=5] [0 0 1 2 0]
    """
    along = x.shape.get(dim)
    part = update.shape.get(along.name)
    x.shape.select(update.shape.without([along.name]))
    if update.dtype != x.dtype:
        raise ValueError(f"x is {short(x.dtype)}, but the update is {short(update.dtype)}")
    if part.size > along.size:
        raise ValueError(f"an update of {part} does not fit into {along}")
    last = along.size - part.size
    if isinstance(start, int | np.integer):
        first = max(0, min(int(start), last))
        position = arange(along)
        inside = (position >= first) & (position < first + part.size)
        there = window(update, along.name, -first, along.size)
        return where(inside, there, x).transpose(x.shape.names)
    begin = clip(_scalar(start, "start"), 0, last)
    piece, spare = _apart(update, part)
    piece = broadcast(piece, [*x.shape.without([along.name]), *piece.shape.select([spare])])
    return overwrite(x, piece, begin, along.name, spare)


def _apart(x: Tensor, dim: Dimension) -> tuple[Tensor, str]:
    """Returns x with a dim renamed so that no layout splits it, to be looked up by position."""
    spare = unused(dim.name, x.shape)
    return x.rename({dim.name: spare}), spare


def _whole(*positions: Any, instead: str) -> None:
    """Raises ValueError unless positions are known while tracing."""
    for position in positions:
        if position is not None and not isinstance(position, int | np.integer):
            raise ValueError(f"positions are whole numbers, not {position}; for tensors: {instead}")


def _integers(value: Any, role: str) -> Tensor:
    tensor = as_tensor(value)
    if not is_integer(tensor.dtype):
        raise ValueError(f"`{role}` must be integers, got {short(tensor.dtype)}")
    return cast(tensor, "int32")


def _scalar(value: Any, role: str) -> Tensor:
    tensor = _integers(value, role)
    if tensor.shape:
        raise ValueError(f"`{role}` must be without dims, got {tensor.shape}")
    return tensor


def _how_to_pick(x: Tensor, key: Any) -> str:
    """Returns what to write instead of `x[0]`, `x[:, 0]` or `x[mask]`."""
    names = x.shape.names or ("length",)
    if isinstance(getattr(key, "dims", None), Shape) and key.dtype == np.bool_:
        return "a mask leaves a size that depends on numbers: write md.where(mask, x, 0)"
    dim, part = names[0], "0" if isinstance(key, int) else "1:5"
    if isinstance(key, tuple) and len(key) <= len(names):
        pairs = zip(names, key, strict=False)
        picked = [(n, k) for n, k in pairs if not _is_every_position(k)]
        if picked and all(type(k) is int for _, k in picked):
            said = "".join(f"[{name!r}, {k}]" for name, k in picked)
            return f"dims have names, not numbers: write x{said}"
    if isinstance(key, str):
        dim = key
    if any(map(_are_positions, key if isinstance(key, tuple) else (key,))):
        part = "indices"
    return f"name the dim and what of it: write x[{dim!r}, {part}]"


def _is_every_position(key: Any) -> bool:
    return isinstance(key, builtins.slice) and key == builtins.slice(None)


def _are_positions(key: Any) -> bool:
    return isinstance(key, list | np.ndarray) or isinstance(getattr(key, "dims", None), Shape)


def pick(x: Tensor, key: Any) -> Tensor:
    """Returns `x["length", 1:5]` (a slice), `x["length", 0]` or `x["length", indices]`."""
    named_first = isinstance(key, tuple) and len(key) == 2 and isinstance(key[0], str | Dimension)
    if not named_first:
        refuse(_how_to_pick(x, key))
    dim, chosen = key
    if isinstance(chosen, builtins.slice):
        step = 1 if chosen.step is None else chosen.step
        return slice(x, dim, chosen.start, chosen.stop, step)
    if isinstance(chosen, int | np.integer):
        return index(x, dim, int(chosen))
    return take(x, as_tensor(chosen), dim)
