"""Look-up by index: take and scatter in all their forms, one_hot.

An index counts from 0 along the whole of a dim, whatever the layout. Indices outside of [0, size)
are well-defined everywhere: a look-up gives zeros for them, a scatter drops them; there are no
negative indices that count from the end.

Dims that table and indices share pair up, as everywhere. The indices may also have the looked-up
dim itself, with another size: the result then has the indices' one.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from meshdsl.ops.control.checkpoint import BARRIER
from meshdsl.ops.creation import arange, as_tensor, full
from meshdsl.ops.elementwise.arithmetic import add, cast, equal, maximum, minimum, where
from meshdsl.ops.elementwise.broadcasting import need_dims, outer
from meshdsl.ops.operation import operation
from meshdsl.ops.reductions.reduction import equals_extreme
from meshdsl.ops.shapes.shape import broadcast, transpose
from meshdsl.tensors.dims import Dimension, DimLike, Shape, did_you_mean, slips, unused
from meshdsl.tensors.dtypes import is_integer, short
from meshdsl.tensors.tensor import Tensor
from meshdsl.tracing.graph import Aval, Operation, Primitive
from meshdsl.tracing.trace import bind_one, is_derived


def paired(table: Shape, indices: Shape, dim: str) -> tuple[str, ...]:
    """Returns the names of the dims that pair up between a table and its indices."""
    return tuple(d.name for d in indices if d.name != dim and table.find(d.name) is not None)


def looked_up(table: Shape, indices: Shape, dim: str) -> Shape:
    """Returns the dims of the result: those of the indices, then the table's others."""
    return Shape([*indices, *table.without([dim, *paired(table, indices, dim)])])


def _need_integers(indices: Tensor) -> None:
    if not is_integer(indices.dtype):
        raise ValueError(f"the indices must be integers, got {short(indices.dtype)}")


def _check_sizes(table: Shape, indices: Shape, dim: str) -> None:
    for name in paired(table, indices, dim):
        if table.get(name) != indices.get(name):
            raise ValueError(
                f"dim `{name}` has size {table.get(name).size} in the table but "
                f"{indices.get(name).size} in the indices; rename it in one, or make them agree"
            )


def _need_no_slip(table: Shape, indices: Shape, dim: str) -> None:
    """Raises ValueError for dims whose names differ by a slip, such as `batch` and `bacth`."""
    if is_derived():
        return
    problems = [
        f"dim `{mine.name}` of the indices and dim `{theirs.name}` of {table} have one size, and "
        f"names that differ by a slip, so they do not pair up; rename one, as in "
        f"indices.rename({mine.name}='{theirs.name}'), or to a name that is less alike"
        for mine, theirs in slips(indices.without([dim]), table.without([dim]))
    ]
    if problems:
        raise ValueError("; ".join(problems))


def _take_rule(inputs: Sequence[Tensor], params: Mapping[str, Any]) -> list[Aval]:
    table, indices = inputs
    _need_integers(indices)
    _check_sizes(table.shape, indices.shape, params["dim"])
    return [(looked_up(table.shape, indices.shape, params["dim"]), table.dtype)]


def _scatter_rule(inputs: Sequence[Tensor], params: Mapping[str, Any]) -> list[Aval]:
    updates, indices = inputs
    _need_integers(indices)
    _check_sizes(params["shape"], indices.shape, params["dim"])
    assert set(updates.shape) == set(looked_up(params["shape"], indices.shape, params["dim"]))
    return [(params["shape"], updates.dtype)]


def _update_rule(inputs: Sequence[Tensor], params: Mapping[str, Any]) -> list[Aval]:
    x, piece, start = inputs
    assert set(piece.shape.without([params["part"]])) == set(x.shape.without([params["dim"]]))
    assert start.dtype == np.int32
    assert not start.shape.without([params["part"]])
    return [(x.shape, x.dtype)]


def _take_gradient(op: Operation, cotangents: Sequence, wanted: Sequence[bool]) -> list:
    table, indices = op.inputs
    params = {"dim": op.params["dim"], "shape": table.shape}
    return [bind_one(SCATTER_ADD, (cotangents[0], indices), params), None]


def _scatter_add_gradient(op: Operation, cotangents: Sequence, wanted: Sequence[bool]) -> list:
    return [bind_one(TAKE, (cotangents[0], op.inputs[1]), {"dim": op.params["dim"]}), None]


def _scatter_extreme_gradient(op: Operation, cotangents: Sequence, wanted: Sequence[bool]) -> list:
    """Divides the cotangent among the updates that reach the extreme.

    The extremes are computed again from updates behind a barrier, and compared with these updates.
    A compiler may compute an update twice with different rounding: after a cancellation no
    tolerance would be enough, and the cotangent of a segment would be lost.
    """
    indices = op.inputs[1]
    updates = bind_one(BARRIER, op.inputs[:1])
    y = bind_one(op.primitive, (updates, indices), op.params)
    look_up = functools.partial(bind_one, TAKE, params={"dim": op.params["dim"]})
    extreme = look_up(inputs=(y, indices))
    reached = cast(equals_extreme(updates, extreme, op.name == "scatter_max"), y.dtype)
    count = maximum(bind_one(SCATTER_ADD, (reached, indices), op.params), 1)
    return [reached * look_up(inputs=(cotangents[0] / count, indices)), None]


def _update_gradient(op: Operation, cotangents: Sequence, wanted: Sequence[bool]) -> list:
    (x, piece, start), (cotangent,) = op.inputs, cotangents
    rest = part = None
    if wanted[0]:
        rest = bind_one(UPDATE, (cotangent, full(piece.shape, 0, x.dtype), start), op.params)
    if wanted[1]:
        places = start if start.shape else start + arange(piece.shape.get(op.params["part"]))
        part = bind_one(TAKE, (cotangent, places), {"dim": op.params["dim"]})
        part = transpose(part, piece.shape.names)
    return [rest, part, None]


def overwrite(x: Tensor, piece: Tensor, start: Tensor, dim: str, part: str) -> Tensor:
    """Returns x with the positions of a dim from `start` on replaced by those of a piece.

        overwrite(cache, rows, at, "length", "rows")

    Args:
        piece: x's dims, but with the dim `part`, which x lacks, in place of `dim`. No layout
            splits its name, so that every device has the piece.
        start: s32[]. The piece must lie inside of x. Only a piece of a single position may lie
            outside; it is dropped. Or s32[part]: where each position of the piece goes, at most one
            to a place; those outside are dropped.
    """
    return bind_one(UPDATE, (x, piece, start), {"dim": dim, "part": part})


TAKE = Primitive("take", _take_rule, _take_gradient, linear=(0,))
UPDATE = Primitive("update", _update_rule, _update_gradient, linear=(0, 1), additive=True)
SCATTER_ADD = Primitive(
    "scatter_add", _scatter_rule, _scatter_add_gradient, combines="sum", linear=(0,)
)
SCATTER_MAX = Primitive("scatter_max", _scatter_rule, _scatter_extreme_gradient, combines="max")
SCATTER_MIN = Primitive("scatter_min", _scatter_rule, _scatter_extreme_gradient, combines="min")
_SCATTERS = {"add": SCATTER_ADD, "max": SCATTER_MAX, "min": SCATTER_MIN}


def narrow(indices: Tensor, size: int) -> Tensor:
    """Returns 64-bit indices as s32; those outside of the dim stay outside."""
    _need_integers(indices)
    if indices.dtype.itemsize < 8:
        return indices
    inside = (indices >= 0) & (indices < size)
    return cast(where(inside, indices, size), "int32")


@operation
def take(table: Tensor, indices: Tensor | int, dim: DimLike) -> Tensor:
    """Looks indices up along a dim of a table: `md.take(embedding, tokens, "vocab")`.

    Dims that both have pair up: `md.take(logits, labels, "vocab")` with [batch, vocab] and [batch]
    gives [batch].

    Returns:
        [*indices, *the table's other dims]. An index outside of [0, size) gives zeros, on every
        layout, and its gradient is dropped.

    Raises:
        ValueError: the indices are not integers, the table lacks `dim`, another dim that both
            have differs in size, or two dims of one size have names that differ by a slip.

    Examples:
        >>> embedding = md.named([[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]], ["vocab", "embed"])
        >>> print(md.take(embedding, md.named([2, 0], ["length"]), "vocab"))
        f32[length=2, embed=2] [[4. 5.]
         [0. 1.]]
        >>> print(md.take(embedding, md.named([2, 0], ["embed"]), "vocab"))
        f32[embed=2] [4. 1.]
    """
    indices = as_tensor(indices)
    if table.dtype == np.bool_:  # looked up as numbers, which can be summed
        return take(cast(table, "int32"), indices, dim) != 0
    dim = table.shape.get(dim)
    _need_no_slip(table.shape, indices.shape, dim.name)
    return bind_one(TAKE, (table, narrow(indices, dim.size)), {"dim": dim.name})


@operation
def take_along(x: Tensor, indices: Tensor, dim: DimLike) -> Tensor:
    """Looks up along one dim, at each position: `md.take_along(x, md.argsort(x, "n"), "n")`.

    Args:
        indices: integers that have `dim`, of any size; their other dims pair up with x's.

    Returns:
        x's dims with the indices' size of `dim`, after dims that only the indices have. An index
        outside of [0, size) gives zeros, and its gradient is dropped.

    Raises:
        ValueError: the indices lack `dim`; both have a dim that the other lacks; or as for `take`.

    Examples:
        >>> x = md.named([[1, 2, 3], [4, 5, 6]], ["batch", "length"])
        >>> last_first = md.named([[2, 0], [2, 0]], ["batch", "length"])
        >>> print(md.take_along(x, last_first, "length"))
        s32[batch=2, length=2] [[3 1]
         [6 4]]
    """
    name = x.shape.get(dim).name
    if indices.shape.find(name) is None:
        raise ValueError(f"the indices have no dim `{name}`; md.take looks up without it")
    if x.shape.without(indices.shape.names):
        advice = f"look up every combination: md.take(x, indices, {name!r})"
        need_dims(indices, "the indices", x, "x", advice)
    result = take(x, indices, name)
    first = indices.shape.without(x.shape.names)
    return transpose(result, [*first.names, *x.shape.names])


@operation
def scatter(
    x: Tensor,
    indices: Tensor | int,
    updates: Any,
    dim: DimLike,
    mode: str = "set",
    unique: bool = False,
) -> Tensor:
    """Returns x with updates at the positions that indices name along one dim.

    `md.scatter(x, indices, updates, "vocab", mode="add")`. Dims that x and the indices share, apart
    from `dim`, pair up. Each position along the indices' other dims is one update.

    Args:
        updates: a number, or a tensor of x's dtype with some of the dims [*indices, *x's others].
        mode: "set": the last of several updates of one element wins, in row-major order of the
            indices' dims. "add", "max", "min": all updates are combined with the element.
        unique: a promise that no element has two updates, which "set" need not put in order then.
            A single dim of indices is written to x where it is.

    Returns:
        x's dims. An index outside of [0, size) is dropped, and so is its gradient. The gradient of
        "max" and "min" is divided among what reaches the extreme; if x does, it gets half.

    Raises:
        ValueError: an unknown mode, indices that are not integers, updates of another dtype or
            with other dims, dims that differ in size, or by a slip in their names, or 2**31 updates
            or more of one element with "set".

    Examples:
        >>> x = md.named([0.0, 0.0, 0.0, 0.0], ["vocab"])
        >>> tokens = md.named([1, 3, 1], ["length"])
        >>> print(md.scatter(x, tokens, 1.0, "vocab", mode="add"))
        f32[vocab=4] [0. 2. 0. 1.]
    """
    if mode not in ("set", *_SCATTERS):
        raise ValueError(f"unknown mode {mode!r}; choose one of set, {', '.join(_SCATTERS)}")
    dim = x.shape.get(dim)
    indices = narrow(as_tensor(indices), dim.size)
    _check_sizes(x.shape, indices.shape, dim.name)
    _need_no_slip(x.shape, indices.shape, dim.name)
    updates = _updates(x, indices, updates, dim)
    if x.dtype == np.bool_:
        if mode == "add":
            raise ValueError("needs numbers to add, got bool; mode 'max' is their logical or")
        x, updates = cast(x, "uint8"), cast(updates, "uint8")
        return scatter(x, indices, updates, dim.name, mode, unique) != 0
    if mode == "set":
        return _set(x, indices, updates, dim, unique)
    params = {"dim": dim.name, "shape": x.shape}
    moved = bind_one(_SCATTERS[mode], (updates, indices), params)
    return x + moved if mode == "add" else (maximum if mode == "max" else minimum)(x, moved)


def _updates(x: Tensor, indices: Tensor, updates: Any, dim: Dimension) -> Tensor:
    """Returns updates broadcast to all of their dims."""
    updates = as_tensor(updates, x.dtype)
    if updates.dtype != x.dtype:
        raise ValueError(
            f"the updates are {short(updates.dtype)}, but x is {short(x.dtype)}; cast one of them"
        )
    wanted = looked_up(x.shape, indices.shape, dim.name)
    alien = [d for d in updates.shape if d not in wanted]
    if alien:
        unpaired = wanted.without(updates.shape.names).names
        hints = (did_you_mean(each.name, unpaired) for each in alien)
        raise ValueError(
            f"the updates have {Shape(alien)}, but may have the dims of the indices and x's "
            f"others: {wanted}{next(filter(None, hints), '')}"
        )
    return broadcast(updates, wanted)


def _set(x: Tensor, indices: Tensor, updates: Tensor, dim: Dimension, unique: bool) -> Tensor:
    """Adds the update with the largest ordinal at each position, and zeros for all others.

    Where each element has at most one update, no ordinals are needed. A single update is written in
    place, and so are unique ones; where the index differs along other dims, it is compared with
    every position.
    """
    pairs = paired(x.shape, indices.shape, dim.name)
    ordinal = full([], 0, "int32")
    counted = indices.shape.without(pairs)
    if not indices.shape:
        part = Dimension(unused(dim.name, x.shape), 1)
        piece = broadcast(updates, [part, *updates.shape])
        return overwrite(x, piece, cast(indices, "int32"), dim.name, part.name)
    if not counted:
        return transpose(where(one_hot(indices, dim, "bool"), updates, x), x.shape.names)
    if unique and not pairs and len(counted) == 1:
        name = unused(dim.name, updates.shape)  # no layout splits it
        at, piece = (each.rename({counted[0].name: name}) for each in (indices, updates))
        return overwrite(x, piece, cast(at, "int32"), dim.name, name)
    if counted.volume >= 2**31:
        raise ValueError(f"too many updates of one element to be ordered: {counted}")
    for each in counted:
        ordinal = outer(add, ordinal * each.size, arange(each))
    ordinals = broadcast(ordinal, indices.shape)
    places = Shape([*x.shape.select(pairs), dim])
    last = bind_one(SCATTER_MAX, (ordinals, indices), {"dim": dim.name, "shape": places})
    apart = (
        unique or counted.volume == 1 or (len(counted) == 1 and _distinct(indices, counted[0].name))
    )
    if not apart:
        wins = bind_one(TAKE, (last, indices), {"dim": dim.name}) == ordinals
        updates = where(wins, updates, 0)
    params = {"dim": dim.name, "shape": x.shape}
    put = bind_one(SCATTER_ADD, (updates, indices), params)
    return transpose(where(last >= 0, put, x), x.shape.names)


def _distinct(indices: Tensor, name: str) -> bool:
    """Whether integers are known to differ along a dim: those of `arange`, plus a number."""
    op = indices.trace.makers.get(indices) if indices.trace is not None else None
    if op is None:
        return False
    having = [t for t in op.inputs if t.shape.find(name) is not None]
    if op.name == "arange":
        return True
    if op.name in ("add", "subtract", "broadcast", "transpose"):
        return len(having) == 1 and _distinct(having[0], name)
    return False


@operation
def one_hot(indices: Tensor | int, dim: Dimension, dtype: Any = "float32") -> Tensor:
    """Returns 1 where `dim`'s index equals the value of `indices`, else 0: [*indices, dim].

    Raises:
        ValueError: the indices are not integers, or have the dim themselves; or `dim` has no size.

    Examples:
        >>> labels = md.named([2, 0, 7], ["batch"])
        >>> print(md.one_hot(labels, md.Dimension("vocab", 3)))
        f32[batch=3, vocab=3] [[0. 0. 1.]
         [1. 0. 0.]
         [0. 0. 0.]]
    """
    indices = as_tensor(indices)
    _need_integers(indices)
    name = dim if isinstance(dim, str) else dim.name
    if indices.shape.find(name) is not None:
        raise ValueError(
            f"the indices have dim `{name}` as well, and a result has a name once; rename theirs "
            f"first, as in indices.rename({name}='{unused(name, indices.shape)}')"
        )
    if indices.dtype.itemsize < 4:  # too narrow to count along a long dim
        indices = cast(indices, "int32")
    return cast(outer(equal, indices, arange(dim, indices.dtype)), dtype)
