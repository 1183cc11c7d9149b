"""The axis, direction and first step of a cumulative instruction on a shard."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax

from meshdsl.lowering.parameters import Before, parameters_of
from meshdsl.lowering.program import Instruction


def axis_and_direction(instruction: Instruction, number: int) -> tuple[int, bool]:
    """Returns the axis of operand `number` along which an instruction runs, and if in reverse."""
    params = parameters_of(instruction, Before)
    return instruction.inputs[number].local.position(params["dim"]), params["reverse"]


def index_of(size: int, step: int, at: int, reverse: bool) -> tuple[Any, ...]:
    """Returns the index of the first (0) or the last (-1) step along an axis."""
    last = step == -1
    return (*[slice(None)] * at, 0 if last == reverse else size - 1)


def shifted(x: Any, at: int, reverse: bool, fill: float) -> Any:
    """Returns x shifted by one step along an axis; the first step becomes `fill`."""
    size = x.shape[at]
    first = jnp.full_like(lax.slice_in_dim(x, 0, 1, axis=at), fill)
    if reverse:
        return jnp.concatenate([lax.slice_in_dim(x, 1, size, axis=at), first], at)
    return jnp.concatenate([first, lax.slice_in_dim(x, 0, size - 1, axis=at)], at)
