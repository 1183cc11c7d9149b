"""Instructions that only lay data out anew."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jax import lax

from meshdsl.lowering.backends.jax.machine import Arrays, Emitter, Machine, align, device_index
from meshdsl.lowering.program import Instruction
from meshdsl.tensors.cuts import cut


def _broadcast(machine: Machine, instruction: Instruction, inputs: Arrays) -> Any:
    (out,) = instruction.outputs
    aligned = align(inputs[0], instruction.inputs[0].local, out.local)
    return jnp.broadcast_to(aligned, out.local.sizes)


def _slice(machine: Machine, instruction: Instruction, inputs: Arrays) -> Any:
    if not instruction.params["axes"]:
        return inputs[0]
    (out,), axes = instruction.outputs, instruction.params["axes"]
    at = out.local.position(instruction.params["dim"])
    size = out.local[at].size
    blocks = cut(jnp, inputs[0], at, machine.counts(axes))
    return lax.dynamic_slice_in_dim(blocks, device_index(axes) * size, size, at)


EMITTERS: Mapping[str, Emitter] = {
    "reshape": lambda machine, instruction, inputs: jnp.reshape(
        inputs[0], instruction.outputs[0].local.sizes
    ),
    "rename": lambda machine, instruction, inputs: inputs[0],
    "transpose": lambda machine, instruction, inputs: align(
        inputs[0], instruction.inputs[0].local, instruction.outputs[0].local
    ),
    "broadcast": _broadcast,
    "slice": _slice,
}
