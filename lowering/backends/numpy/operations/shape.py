"""Instructions that only lay data out anew."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from meshdsl.lowering.backends.numpy.machine import Arrays, Emitter, Machine, align
from meshdsl.lowering.program import Instruction
from meshdsl.tensors.cuts import cut


def _reshape(machine: Machine, instruction: Instruction, inputs: Arrays) -> np.ndarray:
    return inputs[0].reshape(machine.mesh.size, *instruction.outputs[0].local.sizes)


def _broadcast(machine: Machine, instruction: Instruction, inputs: Arrays) -> np.ndarray:
    (out,) = instruction.outputs
    aligned = align(inputs[0], instruction.inputs[0].local, out.local)
    return np.broadcast_to(aligned, (machine.mesh.size, *out.local.sizes))


def _slice(machine: Machine, instruction: Instruction, inputs: Arrays) -> np.ndarray:
    if not instruction.params["axes"]:
        return inputs[0]
    local = instruction.inputs[0].local
    at = local.position(instruction.params["dim"])
    axes = instruction.params["axes"]
    blocks = cut(np, inputs[0], at + 1, machine.counts(axes))
    parts = np.split(blocks, machine.mesh.extent(axes), axis=at + 1)
    index = machine.index(axes)
    return np.stack([parts[i][device] for device, i in enumerate(index)])


EMITTERS: Mapping[str, Emitter] = {
    "reshape": _reshape,
    "rename": lambda machine, instruction, inputs: inputs[0],
    "transpose": lambda machine, instruction, inputs: align(
        inputs[0], instruction.inputs[0].local, instruction.outputs[0].local
    ),
    "broadcast": _broadcast,
    "slice": _slice,
}
