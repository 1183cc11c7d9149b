"""Constants, index ramps and the device index."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from meshdsl.lowering.backends.numpy.machine import Arrays, Emitter, Machine
from meshdsl.lowering.program import Instruction


def _full(machine: Machine, instruction: Instruction, inputs: Arrays) -> np.ndarray:
    (out,) = instruction.outputs
    shape = (machine.mesh.size, *out.local.sizes)
    return np.full(shape, instruction.params["value"], out.dtype)


def _literal(machine: Machine, instruction: Instruction, inputs: Arrays) -> np.ndarray:
    data = instruction.params["data"]
    return np.broadcast_to(data, (machine.mesh.size, *data.shape))


def _iota(machine: Machine, instruction: Instruction, inputs: Arrays) -> np.ndarray:
    size = instruction.outputs[0].local[0].size
    return np.broadcast_to(np.arange(size, dtype=np.int32), (machine.mesh.size, size))


def _device_index(machine: Machine, instruction: Instruction, inputs: Arrays) -> np.ndarray:
    return machine.index(instruction.params["axes"])


EMITTERS: Mapping[str, Emitter] = {
    "full": _full,
    "literal": _literal,
    "iota": _iota,
    "device_index": _device_index,
}
