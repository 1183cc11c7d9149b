"""Look-up by index, and adding up by index."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from meshdsl.dims import Shape
from meshdsl.lowering.backends.jax.machine import Arrays, Emitter, Machine, align
from meshdsl.lowering.program import Instruction


def _take(machine: Machine, instruction: Instruction, inputs: Arrays) -> Any:
    table, indices = inputs
    rows = instruction.inputs[0].local
    at = rows.position(instruction.params["dim"])
    inside = jnp.where(indices < 0, rows[at].size, indices)
    found = jnp.take(table, inside, axis=at, mode="fill", fill_value=0)
    if at == 0:
        return found
    moved = tuple(range(at, at + indices.ndim))
    return jnp.moveaxis(found, moved, tuple(range(indices.ndim)))


def _scatter_add(machine: Machine, instruction: Instruction, inputs: Arrays) -> Any:
    updates, indices = inputs
    (out,) = instruction.outputs
    at = out.local.position(instruction.params["dim"])
    rest = out.local.without([instruction.params["dim"]])
    ordered = Shape([*instruction.inputs[1].local, *rest])
    updates = align(updates, instruction.inputs[0].local, ordered)
    rows = out.local[at].size
    zeros = jnp.zeros((rows, *rest.sizes), out.dtype)
    inside = jnp.where(indices < 0, rows, indices)
    return jnp.moveaxis(zeros.at[inside].add(updates, mode="drop"), 0, at)


EMITTERS: Mapping[str, Emitter] = {
    "take": _take,
    "scatter_add": _scatter_add,
}
