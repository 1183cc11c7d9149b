"""Operations that put tensors together along a dim and take them apart again."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from meshdsl.ops.creation import as_tensor
from meshdsl.ops.elementwise.arithmetic import add
from meshdsl.ops.operation import operation
from meshdsl.ops.shapes.shape import broadcast, merge
from meshdsl.ops.shapes.slicing import index, window
from meshdsl.tensors.dims import Dimension, DimLike, Shape, name_of, unused
from meshdsl.tensors.dtypes import short
from meshdsl.tensors.tensor import Tensor
from meshdsl.tracing.graph import Aval, Operation, Primitive, Work
from meshdsl.tracing.trace import bind, bind_one

# Up to this many copies are concatenated; more become a dim of their own that is merged.
_FEW = 8


def _concat_rule(inputs: Sequence[Tensor], params: Mapping[str, Any]) -> list[Aval]:
    name, first = params["dim"], inputs[0]
    total = Dimension(name, sum(x.shape.get(name).size for x in inputs))
    return [(Shape(total if d.name == name else d for d in first.shape), first.dtype)]


def _concat_gradient(op: Operation, cotangents: Sequence, wanted: Sequence[bool]) -> list:
    name = op.params["dim"]
    parts = _parts(cotangents[0], name, [x.shape.get(name).size for x in op.inputs], wanted)
    return [next(parts) if on else None for on in wanted]


def _split_into_rule(inputs: Sequence[Tensor], params: Mapping[str, Any]) -> list[Aval]:
    (x,), name = inputs, params["dim"]
    return [
        (Shape(Dimension(name, size) if d.name == name else d for d in x.shape), x.dtype)
        for _, size in params["parts"]
    ]


def _split_into_gradient(op: Operation, cotangents: Sequence, wanted: Sequence[bool]) -> list:
    (x,), name = op.inputs, op.params["dim"]
    size = x.shape.get(name).size
    order = x.shape.names
    parts = [
        (start, part, g.transpose(order))
        for (start, part), g in zip(op.params["parts"], cotangents, strict=True)
        if g is not None
    ]
    if sum(part for _, part, _ in parts) == size:
        return [_concat([g for _, _, g in parts], name)]
    padded = [window(g, name, -start, size) for start, _, g in parts]
    return [functools.reduce(add, padded)]


def _concat(tensors: Sequence[Tensor], name: str) -> Tensor:
    return tensors[0] if len(tensors) == 1 else bind_one(CONCAT, tensors, {"dim": name})


def _parts(x: Tensor, name: str, sizes: Sequence[int], wanted: Sequence[bool]) -> Iterator[Tensor]:
    """Yields the wanted ones of the consecutive parts of a dim."""
    starts = itertools.accumulate(sizes, initial=0)
    every = zip(starts, sizes, wanted, strict=False)
    parts = tuple((start, size) for start, size, on in every if on)
    if len(parts) == 1:
        return iter([window(x, name, *parts[0])])
    return iter(bind(SPLIT_INTO, (x,), {"dim": name, "parts": parts}).outputs)


def _stack_rule(inputs: Sequence[Tensor], params: Mapping[str, Any]) -> list[Aval]:
    dim = Dimension(params["dim"], len(inputs))
    return [(Shape([dim, *inputs[0].shape]), inputs[0].dtype)]


def _stack_gradient(op: Operation, cotangents: Sequence, wanted: Sequence[bool]) -> list:
    name = op.params["dim"]
    return [index(cotangents[0], name, at) if on else None for at, on in enumerate(wanted)]


def _every(op: Operation) -> tuple[int, ...]:
    return tuple(range(len(op.inputs)))


CONCAT = Primitive(
    "concat", _concat_rule, _concat_gradient, work=Work.NONE, linear=_every, additive=True
)
SPLIT_INTO = Primitive("split_into", _split_into_rule, _split_into_gradient, work=Work.NONE)
STACK = Primitive(
    "stack", _stack_rule, _stack_gradient, work=Work.NONE, linear=_every, additive=True
)


@operation
def concat(tensors: Sequence[Any], dim: DimLike) -> Tensor:
    """Puts tensors one after the other along a dim: `md.concat([past, recent], "length")`.

    Their other dims are the same; the result has them in the order of the first tensor.

    Raises:
        ValueError: no tensors, different dtypes, a tensor without `dim`, or other dims that differ.

    Examples:
        >>> past = md.named([[1, 2], [3, 4]], ["batch", "length"])
        >>> recent = md.named([[5], [6]], ["batch", "length"])
        >>> print(md.concat([past, recent], "length"))
        s32[batch=2, length=3] [[1 2 5]
         [3 4 6]]
    """
    first, *_ = parts = _alike(tensors)
    name = name_of(dim)
    rest = first.shape.without([first.shape.get(name).name])
    for number, part in enumerate(parts, 1):
        along = part.shape.get(name)
        _same_dims(rest, part.shape.without([along.name]), number)
    result = _concat([part.transpose(first.shape.names) for part in parts], name)
    result.shape.get(dim)
    return result


@operation
def stack(tensors: Sequence[Any], dim: DimLike) -> Tensor:
    """Puts tensors of the same dims side by side, along one more dim: `md.stack([x, y], "pair")`.

    That dim leads the result; the others are in the order of the first tensor.

    Raises:
        ValueError: no tensors, different dtypes or dims, tensors that have the dim, or a Dimension
            of another size than the number of tensors.

    Examples:
        >>> query, key = md.named([1, 2], ["embed"]), md.named([3, 4], ["embed"])
        >>> print(md.stack([query, key], "pair"))
        s32[pair=2, embed=2] [[1 2]
         [3 4]]
    """
    first, *_ = parts = _alike(tensors)
    name = name_of(dim)
    if name in first.shape.names:
        raise ValueError(f"the tensors have a dim `{name}` already; md.concat joins along it")
    if not isinstance(dim, str) and dim.size != len(parts):
        raise ValueError(f"{len(parts)} tensors do not make {dim}")
    for number, part in enumerate(parts, 1):
        _same_dims(first.shape, part.shape, number)
    order = first.shape.names
    return bind_one(STACK, [part.transpose(order) for part in parts], {"dim": name})


@operation
def unstack(x: Tensor, dim: DimLike) -> list[Tensor]:
    """Returns x at every position of a dim, without it: `query, key = md.unstack(both, "pair")`.

    Examples:
        >>> both = md.named([[1, 2], [3, 4]], ["pair", "embed"])
        >>> query, key = md.unstack(both, "pair")
        >>> print(query, key)
        s32[embed=2] [1 2] s32[embed=2] [3 4]
    """
    along = x.shape.get(dim)
    return [index(x, along.name, at) for at in range(along.size)]


@operation
def split_into(x: Tensor, dim: DimLike, sizes: int | Sequence[int]) -> list[Tensor]:
    """Divides a dim into consecutive parts: `gate, up = md.split_into(x, "d_ff", 2)`.

    Args:
        sizes: those of the parts, which add up to the dim's; or the number of equal parts.

    Raises:
        ValueError: the sizes do not add up to the dim's, or the dim has no such number of equal
            parts.

    Examples:
        >>> x = md.named([1, 2, 3, 4, 5, 6], ["d_ff"])
        >>> gate, up = md.split_into(x, "d_ff", 2)
        >>> print(gate, up)
        s32[d_ff=3] [1 2 3] s32[d_ff=3] [4 5 6]
        >>> print(*md.split_into(x, "d_ff", [1, 3, 2]), sep=", ")
        s32[d_ff=1] [1], s32[d_ff=3] [2 3 4], s32[d_ff=2] [5 6]
    """
    along = x.shape.get(dim)
    if isinstance(sizes, int):
        if sizes < 1 or along.size % sizes:
            raise ValueError(f"{along} has no {sizes} equal parts")
        sizes = [along.size // sizes] * sizes
    if sum(sizes) != along.size or min(sizes, default=0) < 1:
        raise ValueError(f"parts of {list(sizes)} do not make up {along}")
    return list(_parts(x, along.name, sizes, [True] * len(sizes)))


@operation
def repeat(x: Tensor, dim: DimLike, times: int) -> Tensor:
    """Returns x with each element of a dim `times` in a row: [a, b] -> [a, a, b, b].

    Raises:
        ValueError: `times` is below 1.

    Examples:
        >>> print(md.repeat(md.named([1, 2], ["heads"]), "heads", 3))
        s32[heads=6] [1 1 1 2 2 2]
    """
    return _copies(x, x.shape.get(dim), times, minor=True)


@operation
def tile(x: Tensor, dim: DimLike, times: int) -> Tensor:
    """Returns x `times` in a row along a dim: [a, b] -> [a, b, a, b].

    Raises:
        ValueError: `times` is below 1.

    Examples:
        >>> print(md.tile(md.named([1, 2], ["width"]), "width", 3))
        s32[width=6] [1 2 1 2 1 2]
    """
    along = x.shape.get(dim)
    if 1 < times <= _FEW:
        return _concat([x] * times, along.name)
    return _copies(x, along, times, minor=False)


def _copies(x: Tensor, dim: Dimension, times: int, minor: bool) -> Tensor:
    if times < 1:
        raise ValueError(f"`times` must be 1 or more, got {times}")
    if times == 1:
        return x
    copy = Dimension(unused("copy", x.shape), times)
    pair = [dim, copy] if minor else [copy, dim]
    at = x.shape.position(dim.name)
    spread = broadcast(x, [*x.shape[:at], *pair, *x.shape[at + 1 :]])
    return merge(spread, pair, dim.name)


def _alike(tensors: Sequence[Any]) -> list[Tensor]:
    """Returns the operands as tensors of one dtype."""
    parts = [as_tensor(tensor) for tensor in tensors]
    if not parts:
        raise ValueError("give at least one tensor")
    for number, part in enumerate(parts, 1):
        if part.dtype != parts[0].dtype:
            raise ValueError(
                f"tensor 1 is {short(parts[0].dtype)}, but tensor {number} is "
                f"{short(part.dtype)}; cast one of them"
            )
    return parts


def _same_dims(expected: Shape, dims: Shape, number: int) -> None:
    if set(expected) != set(dims):
        raise ValueError(f"tensor {number} has the dims {dims} where tensor 1 has {expected}")
