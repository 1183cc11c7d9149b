"""Reductions over named dims: sum, max, min, mean."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from meshdsl.dims import DimsLike, Shape
from meshdsl.dtypes import is_float, rounding, short
from meshdsl.graph import Aval, Operation, Primitive, Tensor
from meshdsl.ops.operation import operation
from meshdsl.trace import bind_one


def _rule(inputs: Sequence[Tensor], params: Mapping[str, Any]) -> list[Aval]:
    (x,) = inputs
    if x.dtype == np.bool_:
        raise ValueError("needs numbers, got bool; cast first, as in md.cast(x, 'float32')")
    return [(x.shape.without(params["over"]), x.dtype)]


def _sum_gradient(op: Operation, cotangents: Sequence, wanted: Sequence[bool]) -> list[Tensor]:
    return [cotangents[0].broadcast(op.inputs[0].shape)]


def _extreme_gradient(op: Operation, cotangents: Sequence, wanted: Sequence[bool]) -> list[Tensor]:
    """Shares the cotangent among the elements that reach the extreme, or miss it by rounding.

    A compiler may compute x a second time here, rounded differently: equality alone would lose the
    gradient.
    """
    (x,), (y,) = op.inputs, op.outputs
    slack = rounding(x.dtype) * abs(y)
    near = x >= y - slack if op.name == "max" else x <= y + slack
    reached = (near | (x == y)).cast(x.dtype)
    return [reached * (cotangents[0] / sum(reached, op.params["over"]))]


SUM = Primitive("sum", _rule, _sum_gradient)
MAX = Primitive("max", _rule, _extreme_gradient)
MIN = Primitive("min", _rule, _extreme_gradient)


def _over(x: Tensor, over: DimsLike | None) -> tuple[str, ...]:
    return x.shape.names if over is None else x.shape.select(over).names


def _reduce(primitive: Primitive, x: Tensor, over: DimsLike | None) -> Tensor:
    names = _over(x, over)
    return bind_one(primitive, (x,), {"over": names}) if names else x


@operation
def sum(x: Tensor, over: DimsLike | None = None) -> Tensor:
    """Returns the sum over some dims, or over all."""
    return _reduce(SUM, x, over)


@operation
def max(x: Tensor, over: DimsLike | None = None) -> Tensor:
    """Returns the maximum over some dims, or over all.

    The gradient is shared among the elements that equal it, up to rounding. NaN wins.
    """
    return _reduce(MAX, x, over)


@operation
def min(x: Tensor, over: DimsLike | None = None) -> Tensor:
    """Returns the minimum over some dims, or over all.

    The gradient is shared among the elements that equal it, up to rounding. NaN wins.
    """
    return _reduce(MIN, x, over)


@operation
def mean(x: Tensor, over: DimsLike | None = None) -> Tensor:
    """Returns the mean over some dims, or over all; half precision is summed in float32."""
    need_float(x)
    count = x.shape.select(_over(x, over)).volume
    wide = x.cast("float32") if x.dtype.itemsize < 4 else x
    return (_reduce(SUM, wide, over) * (1.0 / count)).cast(x.dtype)


def sum_to(x: Tensor, shape: Shape) -> Tensor:
    """Returns x summed over the dims that `shape` lacks: the gradient of broadcasting."""
    if len(x.shape) == len(shape):
        return x
    kept = set(shape.names)
    return bind_one(SUM, (x,), {"over": tuple(n for n in x.shape.names if n not in kept)})


def need_float(x: Tensor) -> None:
    """Raises ValueError unless x is floating-point."""
    if not is_float(x.dtype):
        raise ValueError(f"needs a floating-point tensor, got {short(x.dtype)}")
