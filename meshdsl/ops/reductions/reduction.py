"""Reductions over named dims: sum, prod, max, min, mean, any, all, argmax, argmin.

Over a split dim each device reduces its own shard, and what then moves has the size of the result.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from meshdsl.late import late
from meshdsl.ops.operation import operation
from meshdsl.tensors.dims import DimLike, DimsLike, Shape
from meshdsl.tensors.dtypes import accumulator, is_complex, is_float, need_kind, rounding, short
from meshdsl.tensors.tensor import Tensor
from meshdsl.tracing.graph import Aval, Form, Operation, Primitive
from meshdsl.tracing.trace import bind_one


def _rule(inputs: Sequence[Tensor], params: Mapping[str, Any]) -> list[Aval]:
    (x,) = inputs
    if x.dtype == np.bool_:
        raise ValueError("needs numbers, got bool; cast first, as in md.cast(x, 'float32')")
    return [(x.shape.without(params["over"]), x.dtype)]


def _extreme_rule(inputs: Sequence[Tensor], params: Mapping[str, Any]) -> list[Aval]:
    avals = _rule(inputs, params)
    need_kind(inputs[0].dtype, "fi")
    return avals


def _sum_gradient(op: Operation, cotangents: Sequence, wanted: Sequence[bool]) -> list[Tensor]:
    return [cotangents[0].broadcast(op.inputs[0].shape)]


def equals_extreme(x: Tensor, extreme: Tensor, largest: bool) -> Tensor:
    """Whether elements equal their maximum, or minimum if not `largest`, up to rounding.

    A compiler may compute x a second time here, rounded differently: equality alone would lose the
    gradient.
    """
    slack = rounding(x.dtype) * abs(extreme)
    near = x >= extreme - slack if largest else x <= extreme + slack
    return near | (x == extreme)


def _extreme_gradient(op: Operation, cotangents: Sequence, wanted: Sequence[bool]) -> list[Tensor]:
    """Divides the cotangent among the elements that equal the extreme, up to rounding."""
    (x,), (y,) = op.inputs, op.outputs
    reached = equals_extreme(x, y, op.name == "max").cast(x.dtype)
    return [reached * (cotangents[0] / sum(reached, op.params["over"]))]


def _prod_gradient(op: Operation, cotangents: Sequence, wanted: Sequence[bool]) -> list[Tensor]:
    """Multiplies by the product of all other elements, which is right for zeros too."""
    (x,) = op.inputs
    return [cotangents[0].broadcast(x.shape) * bind_one(OTHERS, (x,), op.params)]


def _others_rule(inputs: Sequence[Tensor], params: Mapping[str, Any]) -> list[Aval]:
    return [(inputs[0].shape, inputs[0].dtype)]


def _others_gradient(op: Operation, cotangents: Sequence, wanted: Sequence[bool]) -> list[Tensor]:
    return [_others_slope(op.inputs[0], cotangents[0], op.params["over"])]


def _others_slope(x: Tensor, cotangent: Tensor, over: Sequence[str]) -> Tensor:
    """Returns the cotangent of x, given that of the products of all others over some dims.

    The product of all others is that within one dim, times that of the other positions' products.
    """
    cumulative = late("cumulative products")
    dim, *rest = over
    before = cumulative.cumprod(x, dim, exclusive=True)
    after = cumulative.cumprod(x, dim, exclusive=True, reverse=True)
    more = None
    if rest:
        product, params = bind_one(PROD, (x,), {"over": (dim,)}), {"over": tuple(rest)}
        inner = _others_slope(product, sum(cotangent * before * after, dim), rest)
        more = inner.broadcast(x.shape) * (before * after)
        cotangent = cotangent * bind_one(OTHERS, (product,), params).broadcast(x.shape)
    slopes = [
        cumulative.product_slope(
            x, cotangent * side, {"dim": dim, "reverse": back, "exclusive": True}
        )
        for side, back in ((after, False), (before, True))
    ]
    slope = slopes[0] + slopes[1]
    return slope if more is None else slope + more


def _arg_rule(inputs: Sequence[Tensor], params: Mapping[str, Any]) -> list[Aval]:
    (x,) = inputs
    need_kind(x.dtype, "fi")
    return [(x.shape.without([params["dim"]]), np.dtype("int32"))]


SUM = Primitive(
    "sum",
    _rule,
    _sum_gradient,
    form=Form.REDUCTION,
    positionwise=True,
    combines="sum",
    linear=(0,),
)
PROD = Primitive("prod", _rule, _prod_gradient, form=Form.REDUCTION)
OTHERS = Primitive("prod_others", _others_rule, _others_gradient)
MAX = Primitive(
    "max", _extreme_rule, _extreme_gradient, form=Form.REDUCTION, positionwise=True, combines="max"
)
MIN = Primitive(
    "min", _extreme_rule, _extreme_gradient, form=Form.REDUCTION, positionwise=True, combines="min"
)
ARGMAX = Primitive("argmax", _arg_rule, flat=True, form=Form.REDUCTION, chooses=True)
ARGMIN = Primitive("argmin", _arg_rule, flat=True, form=Form.REDUCTION, chooses=True)


def _over(x: Tensor, over: DimsLike | None) -> tuple[str, ...]:
    return x.shape.names if over is None else x.shape.select(over).names


def _reduce(primitive: Primitive, x: Tensor, over: DimsLike | None) -> Tensor:
    names = _over(x, over)
    return bind_one(primitive, (x,), {"over": names}) if names else x


@operation
def sum(x: Tensor, over: DimsLike | None = None) -> Tensor:
    """Returns the sum over some dims, or over all.

    Raises:
        ValueError: x lacks a dim, or is bool.

    Examples:
        >>> x = md.named([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]], ["batch", "length"])
        >>> print(md.sum(x, over="length"))
        f32[batch=2] [ 6. 15.]
        >>> print(md.sum(x))
        f32[] 21.
    """
    return _reduce(SUM, x, over)


@operation
def max(x: Tensor, over: DimsLike | None = None) -> Tensor:
    """Returns the maximum over some dims, or over all.

    The gradient is shared among the elements that equal it, up to rounding. NaN wins.

    Raises:
        ValueError: x lacks a dim, or is bool or complex.

    Examples:
        >>> x = md.named([[1.0, 5.0, 3.0], [4.0, 2.0, 6.0]], ["batch", "length"])
        >>> print(md.max(x, over="length"))
        f32[batch=2] [5. 6.]
        >>> print(md.max(x, over="batch"))
        f32[length=3] [4. 5. 6.]
    """
    return _reduce(MAX, x, over)


@operation
def min(x: Tensor, over: DimsLike | None = None) -> Tensor:
    """Returns the minimum over some dims, or over all.

    The gradient is shared among the elements that equal it, up to rounding. NaN wins.

    Raises:
        ValueError: x lacks a dim, or is bool or complex.

    Examples:
        >>> x = md.named([[1.0, 5.0, 3.0], [4.0, 2.0, 6.0]], ["batch", "length"])
        >>> print(md.min(x, over="length"))
        f32[batch=2] [1. 2.]
        >>> print(md.min(x, over="batch"))
        f32[length=3] [1. 2. 3.]
    """
    return _reduce(MIN, x, over)


@operation
def mean(x: Tensor, over: DimsLike | None = None) -> Tensor:
    """Returns the mean over some dims, or over all; half precision is summed in float32.

    Raises:
        ValueError: x lacks a dim, or is neither floating-point nor complex.

    Examples:
        >>> x = md.named([[1.0, 2.0, 6.0], [4.0, 5.0, 6.0]], ["batch", "length"])
        >>> print(md.mean(x, over="length"))
        f32[batch=2] [3. 5.]
        >>> print(md.mean(x, over=["batch", "length"]))
        f32[] 4.
    """
    if not is_complex(x.dtype):
        need_float(x)
    count = x.shape.select(_over(x, over)).volume
    wide = x.cast(accumulator(x.dtype))
    return (_reduce(SUM, wide, over) * (1.0 / count)).cast(x.dtype)


@operation
def prod(x: Tensor, over: DimsLike | None = None) -> Tensor:
    """Returns the product over some dims, or over all; half precision is multiplied in float32.

    It is the exact product, rounded. It is infinite or zero only if the product itself leaves the
    range of the dtype, even if products of some elements do. The same holds for the gradient, the
    product of all others.

    Raises:
        ValueError: x lacks a dim, or is bool.

    Examples:
        >>> x = md.named([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]], ["batch", "length"])
        >>> print(md.prod(x, over="length"))
        f32[batch=2] [  6. 120.]
    """
    return _reduce(PROD, x.cast(accumulator(x.dtype)), over).cast(x.dtype)


@operation
def any(x: Tensor, over: DimsLike | None = None) -> Tensor:
    """Returns whether any of the bools over some dims, or over all, is true.

    Raises:
        ValueError: the mask lacks a dim, or is not bool.

    Examples:
        >>> mask = md.named([[False, True], [False, False]], ["batch", "length"])
        >>> print(md.any(mask, over="length"))
        bool[batch=2] [ True False]
    """
    need_bool(x)
    return _reduce(MAX, x.cast("uint8"), over) != 0


@operation
def all(x: Tensor, over: DimsLike | None = None) -> Tensor:
    """Returns whether all of the bools over some dims, or over all, are true.

    Raises:
        ValueError: the mask lacks a dim, or is not bool.

    Examples:
        >>> mask = md.named([[False, True], [True, True]], ["batch", "length"])
        >>> print(md.all(mask, over="length"))
        bool[batch=2] [False  True]
    """
    need_bool(x)
    return _reduce(MIN, x.cast("uint8"), over) != 0


@operation
def argmax(x: Tensor, dim: DimLike) -> Tensor:
    """Returns where along a dim the maximum is, as s32: `md.argmax(logits, "vocab")`.

    Of equal elements the first counts. NaN is larger than everything, as for `max`.

    Raises:
        ValueError: x lacks the dim, or is complex.

    Examples:
        >>> logits = md.named([[0.0, 2.0, 1.0], [3.0, 3.0, 1.0]], ["batch", "vocab"])
        >>> print(md.argmax(logits, "vocab"))
        s32[batch=2] [1 0]
    """
    return _arg(ARGMAX, x, dim)


@operation
def argmin(x: Tensor, dim: DimLike) -> Tensor:
    """Returns where along a dim the minimum is, as s32; the first NaN, where there is one.

    Raises:
        ValueError: x lacks the dim, or is complex.

    Examples:
        >>> x = md.named([[2.0, 0.0, 1.0], [3.0, 1.0, 1.0]], ["batch", "vocab"])
        >>> print(md.argmin(x, "vocab"))
        s32[batch=2] [1 1]
    """
    return _arg(ARGMIN, x, dim)


def _arg(primitive: Primitive, x: Tensor, dim: DimLike) -> Tensor:
    numbers = x.cast("uint8") if x.dtype == np.bool_ else x
    return bind_one(primitive, (numbers,), {"dim": x.shape.get(dim).name})


def sum_to(x: Tensor, shape: Shape) -> Tensor:
    """Returns x summed over the dims that `shape` lacks: the gradient of broadcasting."""
    if len(x.shape) == len(shape):
        return x
    names = set(shape.names)
    return bind_one(SUM, (x,), {"over": tuple(n for n in x.shape.names if n not in names)})


def need_float(x: Tensor) -> None:
    """Raises ValueError unless x is floating-point."""
    if not is_float(x.dtype):
        raise ValueError(f"needs a floating-point tensor, got {short(x.dtype)}")


def need_order(x: Tensor) -> None:
    """Raises ValueError if x has complex numbers, of which none is the largest."""
    if is_complex(x.dtype):
        raise ValueError(
            f"complex numbers have no order, got {short(x.dtype)}; take a part, as in md.real(x)"
        )


def need_bool(x: Tensor) -> None:
    """Raises ValueError unless x is bool."""
    if x.dtype != np.bool_:
        raise ValueError(f"needs a bool tensor, got {short(x.dtype)}; compare first, as in x != 0")
