"""Cumulative operations along one dim: cumsum, cumprod, cummax, cummin, linear_recurrence.

Over a split dim each device computes along its own shard. Then the totals, one per device, are
gathered, and each device adds those of the shards before its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from meshdsl.ops.control.checkpoint import BARRIER
from meshdsl.ops.elementwise.arithmetic import cast
from meshdsl.ops.elementwise.broadcasting import need_dims
from meshdsl.ops.operation import operation
from meshdsl.ops.reductions.reduction import equals_extreme
from meshdsl.ops.shapes.shape import broadcast
from meshdsl.tensors.dims import DimLike
from meshdsl.tensors.dtypes import accumulator, need_kind
from meshdsl.tensors.tensor import Tensor
from meshdsl.tracing.graph import Aval, Operation, Primitive
from meshdsl.tracing.trace import bind_one


def _rule(kinds: str) -> Any:
    def rule(inputs: Sequence[Tensor], params: Mapping[str, Any]) -> list[Aval]:
        need_kind(inputs[0].dtype, kinds)
        return [(inputs[0].shape, inputs[0].dtype)]

    return rule


def _recurrence_rule(inputs: Sequence[Tensor], params: Mapping[str, Any]) -> list[Aval]:
    decay, x = inputs
    need_kind(x.dtype, "fic")
    assert set(decay.shape) == set(x.shape) and decay.dtype == x.dtype
    return [(x.shape, x.dtype)]


def _back(params: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the parameters of the same operation in the other direction."""
    return {**params, "reverse": not params["reverse"]}


def _sum_gradient(op: Operation, cotangents: Sequence, wanted: Sequence[bool]) -> list[Tensor]:
    return [bind_one(CUMSUM, (cotangents[0],), _back(op.params))]


def _carried(params: Mapping[str, Any], decay: Tensor, cotangent: Tensor) -> Tensor:
    """Returns the cotangents of the states h[i] = decay[i] * h[i-1] + ... of a recurrence.

    The cotangent of a state is that of the next state times its decay, plus the one from outside.
    The result has h[i], or h[i-1] where it is exclusive.
    """
    cotangent = cotangent.transpose(decay.shape.names)
    back = {**_back(params), "exclusive": True}
    if params["exclusive"]:
        return bind_one(RECURRENCE, (decay, cotangent), back)
    return cotangent + bind_one(RECURRENCE, (decay, decay * cotangent), back)


def _prod_gradient(op: Operation, cotangents: Sequence, wanted: Sequence[bool]) -> list[Tensor]:
    return [product_slope(op.inputs[0], cotangents[0], op.params)]


def product_slope(x: Tensor, cotangent: Tensor, params: Mapping[str, Any]) -> Tensor:
    """Returns the cotangent of x, given that of its cumulative products."""
    before = bind_one(CUMPROD, (x,), {**params, "exclusive": True})
    return before * _carried(params, x, cotangent)


def _extreme_gradient(op: Operation, cotangents: Sequence, wanted: Sequence[bool]) -> list[Tensor]:
    """Sends each cotangent to the nearest earlier element that reached the extreme.

    The extremes are computed again from elements behind a barrier, and compared with these
    elements. A compiler may compute an element twice with different rounding: then none would equal
    it.
    """
    x = bind_one(BARRIER, op.inputs)
    y = bind_one(op.primitive, (x,), op.params)
    reached = equals_extreme(x, y, op.name == "cummax") | (x != x)
    passed = cast(~reached, x.dtype)
    return [cast(reached, x.dtype) * _carried(op.params, passed, cotangents[0])]


def _recurrence_gradient(
    op: Operation, cotangents: Sequence, wanted: Sequence[bool]
) -> list[Tensor | None]:
    decay, x = op.inputs
    carried = _carried(op.params, decay, cotangents[0])
    if not wanted[0]:
        return [None, carried]
    before = bind_one(RECURRENCE, (decay, x), {**op.params, "exclusive": True})
    return [carried * before, carried]


CUMSUM = Primitive("cumsum", _rule("fic"), _sum_gradient, combines="sum", linear=(0,))
CUMPROD = Primitive("cumprod", _rule("fic"), _prod_gradient)
CUMMAX = Primitive("cummax", _rule("fi"), _extreme_gradient, combines="max")
CUMMIN = Primitive("cummin", _rule("fi"), _extreme_gradient, combines="min")
RECURRENCE = Primitive("linear_recurrence", _recurrence_rule, _recurrence_gradient, linear=(1,))


def _along(
    primitive: Primitive, inputs: Sequence[Tensor], dim: DimLike, reverse: bool, exclusive: bool
) -> Tensor:
    """Applies a cumulative primitive; half precision is accumulated in float32."""
    x = inputs[-1]
    params = {"dim": x.shape.get(dim).name, "reverse": bool(reverse), "exclusive": bool(exclusive)}
    wide = accumulator(x.dtype)
    result = bind_one(primitive, [cast(each, wide) for each in inputs], params)
    return cast(result, x.dtype)


@operation
def cumsum(x: Tensor, dim: DimLike, reverse: bool = False, exclusive: bool = False) -> Tensor:
    """Returns at each place the sum up to it: `md.cumsum(x, "length")`.

    Args:
        reverse: sum from the other end.
        exclusive: leave the place's own element out; the first sum is 0.

    Raises:
        ValueError: x lacks the dim, or is bool.

    Examples:
        >>> x = md.named([[1, 2, 3], [4, 5, 6]], ["batch", "length"])
        >>> print(md.cumsum(x, "length"))
        s32[batch=2, length=3] [[ 1  3  6]
         [ 4  9 15]]
        >>> print(md.cumsum(x["batch", 0], "length", exclusive=True))
        s32[length=3] [0 1 3]
    """
    return _along(CUMSUM, (x,), dim, reverse, exclusive)


@operation
def cumprod(x: Tensor, dim: DimLike, reverse: bool = False, exclusive: bool = False) -> Tensor:
    """Returns at each place the product up to it; see `cumsum`.

    Each is the exact product, rounded. It is infinite or zero only if the product itself leaves the
    range of the dtype, even if products of fewer elements do. A zero times an infinity is NaN.
    The gradient is exact at zeros. It is made of `linear_recurrence`, so it may be infinite or NaN
    where a product of some of the elements leaves the range.

    Raises:
        ValueError: x lacks the dim, or is bool.

    Examples:
        >>> x = md.named([1.0, 2.0, 3.0, 4.0], ["length"])
        >>> print(md.cumprod(x, "length"))
        f32[length=4] [ 1.  2.  6. 24.]
        >>> print(md.cumprod(md.named([1e20, 1e20, 1e-20], ["length"]), "length"))
        f32[length=3] [1.e+20    inf 1.e+20]
    """
    return _along(CUMPROD, (x,), dim, reverse, exclusive)


@operation
def cummax(x: Tensor, dim: DimLike, reverse: bool = False, exclusive: bool = False) -> Tensor:
    """Returns at each place the maximum up to it; see `cumsum`. NaN wins.

    The first of an exclusive one is minus infinity, or the smallest integer. The gradient goes to
    the nearest element that reached the maximum.

    Raises:
        ValueError: x lacks the dim, or is bool or complex.

    Examples:
        >>> x = md.named([3, 1, 4, 1, 5], ["length"])
        >>> print(md.cummax(x, "length"))
        s32[length=5] [3 3 4 4 5]
    """
    return _along(CUMMAX, (x,), dim, reverse, exclusive)


@operation
def cummin(x: Tensor, dim: DimLike, reverse: bool = False, exclusive: bool = False) -> Tensor:
    """Returns at each place the minimum up to it; see `cummax`.

    Raises:
        ValueError: x lacks the dim, or is bool or complex.

    Examples:
        >>> x = md.named([3, 1, 4, 1, 5], ["length"])
        >>> print(md.cummin(x, "length"))
        s32[length=5] [3 1 1 1 1]
        >>> print(md.cummin(x, "length", reverse=True))
        s32[length=5] [1 1 1 1 5]
    """
    return _along(CUMMIN, (x,), dim, reverse, exclusive)


@operation
def linear_recurrence(
    decay: Tensor, x: Tensor, dim: DimLike, reverse: bool = False, exclusive: bool = False
) -> Tensor:
    """Returns h[i] = decay[i] * h[i-1] + x[i] along a dim, with h[-1] = 0.

    `md.linear_recurrence(decay, x, "length")` is the heart of linear attention and state-space
    models; it takes a logarithmic number of steps, not one per place.

    The states are those of a loop that rounds each step: one that leaves the range of the dtype is
    infinite, and later ones are infinite or NaN. They are the same on every mesh, except where
    terms of both signs leave the range while their sum does not. If the recurrence of |decay| and
    |x| is finite, so is this one, up to rounding of that one. On a mesh a state that is less than
    four times too large for the dtype may stay finite. Numbers below the least normal one of the
    dtype, `tiny`, may count as zeros; so may a term that has shrunk by more than `tiny` since it
    was part of a state of up to 2**64.

    Args:
        decay: of x's dtype; it broadcasts against x, by name.
        reverse: start at the other end.
        exclusive: give h[i-1] at i.

    Raises:
        ValueError: x lacks `dim`, decay has dims that x lacks, or their dtypes differ.

    Examples:
        >>> x = md.named([1.0, 1.0, 1.0, 1.0], ["length"])
        >>> decay = md.named([0.5, 0.5, 0.5, 0.5], ["length"])
        >>> print(md.linear_recurrence(decay, x, "length"))
        f32[length=4] [1.    1.5   1.75  1.875]
    """
    if decay.dtype != x.dtype:
        raise ValueError(f"decay is {decay.dtype.name}, but x is {x.dtype.name}; cast one of them")
    x.shape.get(dim)
    need_dims(decay, "the decays", x, "x", "broadcast x first: md.broadcast(x, dims)")
    decay = broadcast(decay, x.shape)
    return _along(RECURRENCE, (decay, x), dim, reverse, exclusive)
