"""Reductions over named dims, and what is made of them: mean, softmax, logsumexp."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from meshdsl.dims import DimsLike, Shape
from meshdsl.dtypes import is_float, rounding, short
from meshdsl.graph import Aval, Operation, Primitive, Tensor
from meshdsl.trace import bind_one, operation


def _rule(inputs: Sequence[Tensor], params: Mapping[str, Any]) -> list[Aval]:
    (x,) = inputs
    if x.dtype == np.bool_:
        raise ValueError("needs numbers, got bool; cast first, as in md.cast(x, 'float32')")
    return [(x.shape.without(params["over"]), x.dtype)]


def _sum_gradient(op: Operation, cotangents: Sequence, wanted: Sequence[bool]) -> list[Tensor]:
    from meshdsl.ops.shape import broadcast

    return [broadcast(cotangents[0], op.inputs[0].shape)]


def _extreme_gradient(op: Operation, cotangents: Sequence, wanted: Sequence[bool]) -> list[Tensor]:
    """Shares the cotangent among the elements that reach the extreme, or miss it by rounding.

    A compiler may compute x a second time here, rounded differently: equality alone would lose the
    gradient.
    """
    from meshdsl.ops.elementwise import abs, cast

    (x,), (y,) = op.inputs, op.outputs
    slack = rounding(x.dtype) * abs(y)
    near = x >= y - slack if op.name == "max" else x <= y + slack
    reached = cast(near | (x == y), x.dtype)
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
    """Returns the maximum over some dims, or over all; the gradient is shared among equals."""
    return _reduce(MAX, x, over)


@operation
def min(x: Tensor, over: DimsLike | None = None) -> Tensor:
    """Returns the minimum over some dims, or over all; the gradient is shared among equals."""
    return _reduce(MIN, x, over)


@operation
def mean(x: Tensor, over: DimsLike | None = None) -> Tensor:
    """Returns the mean over some dims, or over all."""
    _need_float(x)
    count = x.shape.select(_over(x, over)).volume
    return _reduce(SUM, x, over) * (1.0 / count)


@operation
def logsumexp(x: Tensor, over: DimsLike) -> Tensor:
    """Returns log(sum(exp(x))) over some dims, without overflow."""
    from meshdsl.ops.elementwise import exp, log, stop_gradient

    _need_float(x)
    largest = stop_gradient(_finite(max(x, over)))
    return log(sum(exp(x - largest), over)) + largest


@operation
def softmax(x: Tensor, over: DimsLike) -> Tensor:
    """Returns exp(x) divided by its sum over some dims."""
    from meshdsl.ops.elementwise import exp, stop_gradient

    _need_float(x)
    scaled = exp(x - stop_gradient(max(x, over)))
    return scaled / sum(scaled, over)


@operation
def log_softmax(x: Tensor, over: DimsLike) -> Tensor:
    """Returns the logarithm of `softmax`."""
    return x - logsumexp(x, over)


def sum_to(x: Tensor, shape: Shape) -> Tensor:
    """Returns x summed over the dims that `shape` lacks: the gradient of broadcasting."""
    if len(x.shape) == len(shape):
        return x
    kept = set(shape.names)
    return bind_one(SUM, (x,), {"over": tuple(n for n in x.shape.names if n not in kept)})


def _finite(x: Tensor) -> Tensor:
    from meshdsl.ops.elementwise import isfinite, where

    return where(isfinite(x), x, 0)


def _need_float(x: Tensor) -> None:
    if not is_float(x.dtype):
        raise ValueError(f"needs a floating-point tensor, got {short(x.dtype)}")
