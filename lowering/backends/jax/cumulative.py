"""Cumulative instructions along one dim of a shard."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
from jax import lax

from meshdsl.dtypes import identity
from meshdsl.lowering.backends.jax.machine import Arrays, Emitter, Machine
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


def _recurrence(machine: Machine, instruction: Instruction, inputs: Arrays) -> Any:
    params, (one, other) = instruction.params, instruction.inputs
    order = [one.local.position(name) for name in other.local.names]
    decay, x = jnp.transpose(inputs[0], order), jnp.asarray(inputs[1])
    at, reverse = other.local.position(params["dim"]), params["reverse"]

    def join(first: Any, second: Any) -> Any:
        return first[0] * second[0], first[1] * second[0] + second[1]

    _, states = lax.associative_scan(join, (decay, x), reverse=reverse, axis=at)
    last = lax.index_in_dim(states, 0 if reverse else -1, at, keepdims=False)
    if params["exclusive"]:
        states = _shifted(states, at, reverse, 0)
    return states, last


EMITTERS: Mapping[str, Emitter] = {
    "cumsum": _cumulative(lax.cumsum, "sum"),
    "cumprod": _cumulative(lax.cumprod, "prod"),
    "cummax": _cumulative(lax.cummax, "max"),
    "cummin": _cumulative(lax.cummin, "min"),
    "linear_recurrence": _recurrence,
}
