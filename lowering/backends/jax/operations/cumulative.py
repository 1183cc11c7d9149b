"""Cumulative instructions along one dim of a shard."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from meshdsl.lowering.backends.jax.machine import Arrays, Emitter, Machine
from meshdsl.lowering.backends.jax.operations.direction import axis_and_direction, index_of, shifted
from meshdsl.lowering.backends.jax.operations.scaling import (
    frexp,
    multiply,
    out_of_range,
    products,
    scaled,
)
from meshdsl.lowering.parameters import Cumulative, Reduction, parameters_of
from meshdsl.lowering.program import Instruction
from meshdsl.tensors.dtypes import identity, is_differentiable


def _cumulative(compute: Callable[..., Any], kind: str) -> Emitter:
    """Returns the emitter of a cumulative function; `kind` names its neutral element."""

    def emit(machine: Machine, instruction: Instruction, inputs: Arrays) -> Any:
        (x,), params = inputs, parameters_of(instruction, Cumulative)
        at, reverse = instruction.inputs[0].local.position(params["dim"]), params["reverse"]
        result = compute(jnp.asarray(x), axis=at, reverse=reverse)
        if params["exclusive"]:
            result = shifted(result, at, reverse, identity(kind, result.dtype))
        return result

    return emit


def _products(x: Any, at: int, reverse: bool, start: Sequence[Any]) -> Any:
    """Returns the products of a start and all elements up to each position.

    If a product may have left the range, all are computed again from mantissas and exponents.

    Args:
        start: a number, its (mantissa, exponent), or empty.
    """
    first, is_smooth = index_of(x.shape[at], 0, at, reverse), is_differentiable(x.dtype)
    number = scaled(*start) if len(start) == 2 else start[0] if start else None
    x_from_start = x if number is None else x.at[first].multiply(number)
    result = lax.cumprod(x_from_start, at, reverse)
    if not is_smooth:
        return result

    def scale(x_from_start: Any, row: Any) -> Any:
        mantissa, exponent = frexp(x_from_start)
        if start:
            number, power = frexp(row)
            mantissa = mantissa.at[first].set(number * start[0])
            exponent = exponent.at[first].set(power + start[1])
        return scaled(*products((mantissa, exponent), at, reverse))

    return lax.cond(out_of_range(result), scale, lambda *_: result, x_from_start, x[first])


def _cumprod(machine: Machine, instruction: Instruction, inputs: Arrays) -> Any:
    """Returns the products of all elements up to each position, times the start if there is one."""
    (x, *start), (at, reverse) = map(jnp.asarray, inputs), axis_and_direction(instruction, 0)
    result = _products(x, at, reverse, start)
    if parameters_of(instruction, Cumulative)["exclusive"]:
        result = shifted(result, at, reverse, 1)
        if start:
            number = scaled(*start) if len(start) == 2 else start[0]
            result = result.at[index_of(x.shape[at], 0, at, reverse)].set(number)
    return result


def _products_before(machine: Machine, instruction: Instruction, inputs: Arrays) -> Sequence[Any]:
    """Returns the product of all rows before each row; for floats, mantissas and exponents."""
    at, reverse = axis_and_direction(instruction, 0)
    if len(inputs) == 1:
        return [shifted(lax.cumprod(inputs[0], at, reverse), at, reverse, 1)]
    parts = products(inputs, at, reverse)
    # 0.5 * 2**1 is 1, the product of no rows.
    return [shifted(v, at, reverse, fill) for v, fill in zip(parts, (0.5, 1), strict=True)]


def _products_of_others(factors: Sequence[Any]) -> tuple[Any, Any]:
    """Returns for each row the (mantissa, exponent) of the product of all other rows."""
    before, after = (
        [
            shifted(v, 0, reverse, fill)
            for v, fill in zip(products(factors, 0, reverse), (0.5, 1), strict=True)
        ]
        for reverse in (False, True)
    )
    return multiply(before, after)


def _products_besides(machine: Machine, instruction: Instruction, inputs: Arrays) -> Sequence[Any]:
    """Returns for each row, given by mantissas and exponents, the product of all other rows."""
    at = instruction.inputs[0].local.position(*parameters_of(instruction, Reduction)["over"])
    parts = _products_of_others([jnp.moveaxis(v, at, 0) for v in inputs])
    return [jnp.moveaxis(v, 0, at) for v in parts]


def _prod_others(machine: Machine, instruction: Instruction, inputs: Arrays) -> Any:
    """Returns the products of all other elements along some dims, times a number if given."""
    (x, *number), local = map(jnp.asarray, inputs), instruction.inputs[0].local
    over = [local.position(name) for name in parameters_of(instruction, Reduction)["over"]]
    front = range(len(over))
    moved = jnp.moveaxis(x, over, front)
    rows = moved.reshape(-1, *moved.shape[len(over) :])
    before, after = (
        shifted(lax.cumprod(rows, 0, reverse), 0, reverse, 1) for reverse in (False, True)
    )
    result = before * after
    is_lost = out_of_range(before) | out_of_range(after)
    if number:
        factor = scaled(*number)
        result, is_lost = result * factor, is_lost | out_of_range(factor)

    def scale(rows: Any) -> Any:
        parts = _products_of_others(frexp(rows))
        return scaled(*(multiply(parts, number) if number else parts))

    result = lax.cond(is_lost | out_of_range(result), scale, lambda _: result, rows)
    return jnp.moveaxis(result.reshape(moved.shape), front, over)


EMITTERS: Mapping[str, Emitter] = {
    "cumsum": _cumulative(lax.cumsum, "sum"),
    "cumprod": _cumprod,
    "cumprod_from": _cumprod,
    "cummax": _cumulative(lax.cummax, "max"),
    "cummin": _cumulative(lax.cummin, "min"),
    "products_before": _products_before,
    "products_besides": _products_besides,
    "prod_others": _prod_others,
}
