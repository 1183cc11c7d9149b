"""Constants, index ramps and the device index."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from jax import lax

from meshdsl.lowering.backends.jax.machine import Arrays, Emitter, Machine, device_index
from meshdsl.lowering.program import Instruction


def _full(machine: Machine, instruction: Instruction, inputs: Arrays) -> Any:
    (out,) = instruction.outputs
    value = np.asarray(instruction.params["value"]).astype(out.dtype)
    return value if not out.shape else lax.full(out.local.sizes, value, out.dtype)


def _device_index(machine: Machine, instruction: Instruction, inputs: Arrays) -> Any:
    return device_index(instruction.params["axes"])


EMITTERS: Mapping[str, Emitter] = {
    "full": _full,
    "literal": lambda machine, instruction, inputs: instruction.params["data"],
    "iota": lambda machine, instruction, inputs: lax.iota(
        np.int32, instruction.outputs[0].local[0].size
    ),
    "device_index": _device_index,
}
