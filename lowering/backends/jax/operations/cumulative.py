"""Cumulative instructions along one dim of a shard."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from meshdsl.lowering.backends.jax.machine import Arrays, Emitter, Machine
from meshdsl.lowering.backends.jax.operations.direction import place, shifted, way
from meshdsl.lowering.backends.jax.operations.scaling import (
    lost,
    multiply,
    parted,
    products,
    scaled,
)
from meshdsl.lowering.parameters import Cumulative, Reduction, parameters_of
from meshdsl.lowering.program import Instruction
from meshdsl.tensors.dtypes import identity, is_differentiable


def _cumulative(compute: Callable[..., Any], kind: str) -> Emitter:
    def emit(machine: Machine, instruction: Instruction, inputs: Arrays) -> Any:
        (x,), params = inputs, parameters_of(instruction, Cumulative)
        at, reverse = instruction.inputs[0].local.position(params["dim"]), params["reverse"]
        found = compute(jnp.asarray(x), axis=at, reverse=reverse)
        if params["exclusive"]:
            found = shifted(found, at, reverse, identity(kind, found.dtype))
        return found

    return emit


def _products(x: Any, at: int, reverse: bool, start: Sequence[Any]) -> Any:
    """Returns the products of a start and all elements up to each.

    Partial products may leave the range where the results do not. Then all are multiplied as
    mantissas and exponents.

    Args:
        start: a number, its (mantissa, exponent), or nothing.
    """
    first, smooth = place(x.shape[at], 0, at, reverse), is_differentiable(x.dtype)
    number = scaled(*start) if len(start) == 2 else start[0] if start else None
    begun = x if number is None else x.at[first].multiply(number)
    found = lax.cumprod(begun, at, reverse)
    if not smooth:
        return found

    def scale(begun: Any, row: Any) -> Any:
        mantissa, exponent = parted(begun)
        if start:
            number, power = parted(row)
            mantissa = mantissa.at[first].set(number * start[0])
            exponent = exponent.at[first].set(power + start[1])
        return scaled(*products((mantissa, exponent), at, reverse))

    return lax.cond(lost(found), scale, lambda *_: found, begun, x[first])


def _cumprod(machine: Machine, instruction: Instruction, inputs: Arrays) -> Any:
    """The products of a start, if there is one, and all elements up to each."""
    (x, *start), (at, reverse) = map(jnp.asarray, inputs), way(instruction, 0)
    found = _products(x, at, reverse, start)
    if parameters_of(instruction, Cumulative)["exclusive"]:
        found = shifted(found, at, reverse, 1)
        if start:
            number = scaled(*start) if len(start) == 2 else start[0]
            found = found.at[place(x.shape[at], 0, at, reverse)].set(number)
    return found


def _products_before(machine: Machine, instruction: Instruction, inputs: Arrays) -> Sequence[Any]:
    """Before each row the product of those up to there; of floats, mantissas and exponents."""
    at, reverse = way(instruction, 0)
    if len(inputs) == 1:
        return [shifted(lax.cumprod(inputs[0], at, reverse), at, reverse, 1)]
    found = products(inputs, at, reverse)
    return [shifted(v, at, reverse, one) for v, one in zip(found, (0.5, 1), strict=True)]


def _besides(factors: Sequence[Any]) -> tuple[Any, Any]:
    """Returns the (mantissa, exponent) of the product of all other rows."""
    before, after = (
        [
            shifted(v, 0, back, one)
            for v, one in zip(products(factors, 0, back), (0.5, 1), strict=True)
        ]
        for back in (False, True)
    )
    return multiply(before, after)


def _products_besides(machine: Machine, instruction: Instruction, inputs: Arrays) -> Sequence[Any]:
    """Of rows of mantissas and exponents the product of all others."""
    at = instruction.inputs[0].local.position(*parameters_of(instruction, Reduction)["over"])
    found = _besides([jnp.moveaxis(v, at, 0) for v in inputs])
    return [jnp.moveaxis(v, 0, at) for v in found]


def _prod_others(machine: Machine, instruction: Instruction, inputs: Arrays) -> Any:
    """The products of all other elements along some dims, and of a number if there is one."""
    (x, *number), local = map(jnp.asarray, inputs), instruction.inputs[0].local
    over = [local.position(name) for name in parameters_of(instruction, Reduction)["over"]]
    front = range(len(over))
    moved = jnp.moveaxis(x, over, front)
    rows = moved.reshape(-1, *moved.shape[len(over) :])
    before, after = (shifted(lax.cumprod(rows, 0, b), 0, b, 1) for b in (False, True))
    found = before * after
    wrong = lost(before) | lost(after)
    if number:
        outside = scaled(*number)
        found, wrong = found * outside, wrong | lost(outside)

    def scale(rows: Any) -> Any:
        parts = _besides(parted(rows))
        return scaled(*(multiply(parts, number) if number else parts))

    found = lax.cond(wrong | lost(found), scale, lambda _: found, rows)
    return jnp.moveaxis(found.reshape(moved.shape), front, over)


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
