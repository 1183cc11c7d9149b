"""Cumulative instructions along one dim of a shard."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from meshdsl.dtypes import identity, is_differentiable, real_dtype
from meshdsl.lowering.backends.jax.machine import Arrays, Emitter, Machine
from meshdsl.lowering.backends.jax.scaling import parted, products, states
from meshdsl.lowering.program import Instruction


def _shifted(x: Any, at: int, reverse: bool, fill: float) -> Any:
    """Moves everything one place on; the first place gets `fill`."""
    size = x.shape[at]
    first = jnp.full_like(lax.slice_in_dim(x, 0, 1, axis=at), fill)
    if reverse:
        return jnp.concatenate([lax.slice_in_dim(x, 1, size, axis=at), first], at)
    return jnp.concatenate([first, lax.slice_in_dim(x, 0, size - 1, axis=at)], at)


def _cumulative(compute: Callable[..., Any], kind: str) -> Emitter:
    def emit(machine: Machine, instruction: Instruction, inputs: Arrays) -> Any:
        (x,), params = inputs, instruction.params
        at, reverse = instruction.inputs[0].local.position(params["dim"]), params["reverse"]
        found = compute(jnp.asarray(x), axis=at, reverse=reverse)
        if params["exclusive"]:
            found = _shifted(found, at, reverse, identity(kind, found.dtype))
        return found

    return emit


def _products(x: Any, at: int, reverse: bool) -> Any:
    """Returns the products of all elements up to each.

    Partial products may leave the range where the results do not: a large one of some elements in
    the middle, after a zero. Then all are multiplied as mantissas and exponents.
    """
    found = lax.cumprod(x, at, reverse)
    if not is_differentiable(x.dtype):
        return found

    def scale(x: Any) -> Any:
        return products(parted(x), at, reverse)

    size = jnp.abs(found)
    lost = ~jnp.isfinite(size) | (size < jnp.finfo(real_dtype(np.dtype(x.dtype))).tiny)
    return lax.cond(jnp.any(lost), scale, lambda x: found, x)


def _cumprod(machine: Machine, instruction: Instruction, inputs: Arrays) -> Any:
    at, reverse = _way(instruction, 0)
    found = _products(jnp.asarray(inputs[0]), at, reverse)
    return _shifted(found, at, reverse, 1) if instruction.params["exclusive"] else found


def _cumprod_from(machine: Machine, instruction: Instruction, inputs: Arrays) -> Any:
    """The products of a start and all elements up to each."""
    x, start = map(jnp.asarray, inputs)
    at, reverse = _way(instruction, 0)
    first = _place(x.shape[at], 0, at, reverse)
    found = _products(x.at[first].multiply(start), at, reverse)
    if instruction.params["exclusive"]:
        found = _shifted(found, at, reverse, 1).at[first].set(start)
    return found


def _recurrence(machine: Machine, instruction: Instruction, inputs: Arrays) -> Any:
    decay, x = _decay_and_x(instruction, inputs)
    at, reverse = _way(instruction, 1)
    found = _states(decay, x, at, reverse)
    last = found[_place(x.shape[at], -1, at, reverse)]
    return _shifted(found, at, reverse, 0) if instruction.params["exclusive"] else found, last


def _recurrence_from(machine: Machine, instruction: Instruction, inputs: Arrays) -> Any:
    decay, x = _decay_and_x(instruction, inputs)
    start, (at, reverse) = inputs[2], _way(instruction, 1)
    first = _place(x.shape[at], 0, at, reverse)
    found = _states(decay, x.at[first].add(decay[first] * start), at, reverse)
    if instruction.params["exclusive"]:
        found = _shifted(found, at, reverse, 0).at[first].set(start)
    return found


def _states(decay: Any, x: Any, at: int, reverse: bool) -> Any:
    """Returns h[i] = decay[i] * h[i-1] + x[i].

    The products of decays of which a scan is made may leave the range where no state does. Those
    of decays up to 1 underflow at worst, which no state tells; others are multiplied as mantissas
    and exponents.
    """

    def plain(decay: Any, x: Any) -> Any:
        def join(first: Any, second: Any) -> Any:
            return first[0] * second[0], first[1] * second[0] + second[1]

        return lax.associative_scan(join, (decay, x), reverse=reverse, axis=at)[1]

    if not is_differentiable(x.dtype):
        return plain(decay, x)

    def scale(decay: Any, x: Any) -> Any:
        return states(parted(decay), x, at, reverse)

    return lax.cond(jnp.any(~(jnp.abs(decay) <= 1)), scale, plain, decay, x)


def _products_before(machine: Machine, instruction: Instruction, inputs: Arrays) -> Any:
    """Before each row of mantissas and exponents the product of those up to there."""
    at, reverse = _way(instruction, 0)
    if len(inputs) == 1:
        found = lax.cumprod(inputs[0], at, reverse)
    else:
        found = products(inputs, at, reverse)
    return _shifted(found, at, reverse, 1)


def _states_before(machine: Machine, instruction: Instruction, inputs: Arrays) -> Any:
    """Before each row the state; it is turned into `through` times it plus `last`."""
    at, reverse = _way(instruction, 0)
    last, through, *exponents = inputs
    if exponents:
        found = states((through, *exponents), last, at, reverse)
    else:
        found = _states(through, last, at, reverse)
    return _shifted(found, at, reverse, 0)


def _way(instruction: Instruction, number: int) -> tuple[int, bool]:
    """Returns the axis along which an instruction goes, by its operand, and whether backwards."""
    params = instruction.params
    return instruction.inputs[number].local.position(params["dim"]), params["reverse"]


def _place(size: int, step: int, at: int, reverse: bool) -> tuple[Any, ...]:
    """Returns the index of the first (0) or the last (-1) step along an axis."""
    last = step == -1
    return (*[slice(None)] * at, 0 if last == reverse else size - 1)


def _decay_and_x(instruction: Instruction, inputs: Arrays) -> tuple[Any, Any]:
    one, other = instruction.inputs[:2]
    order = [one.local.position(name) for name in other.local.names]
    return jnp.transpose(inputs[0], order), jnp.asarray(inputs[1])


EMITTERS: Mapping[str, Emitter] = {
    "cumsum": _cumulative(lax.cumsum, "sum"),
    "cumprod": _cumprod,
    "cumprod_from": _cumprod_from,
    "cummax": _cumulative(lax.cummax, "max"),
    "cummin": _cumulative(lax.cummin, "min"),
    "linear_recurrence": _recurrence,
    "linear_recurrence_from": _recurrence_from,
    "products_before": _products_before,
    "states_before": _states_before,
}
