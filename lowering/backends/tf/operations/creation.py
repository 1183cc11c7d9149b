"""Constants, index ramps and the device index."""

from __future__ import annotations

from collections.abc import Mapping

import tensorflow as tf

from meshdsl.lowering.backends.tf.machine import Arrays, Emitter, Machine, constant
from meshdsl.lowering.program import Instruction


def _full(machine: Machine, instruction: Instruction, inputs: Arrays) -> tf.Tensor:
    (out,) = instruction.outputs
    value = constant(instruction.params["value"], out.dtype)
    return tf.broadcast_to(value, out.local.sizes) if out.shape else value


EMITTERS: Mapping[str, Emitter] = {
    "full": _full,
    "literal": lambda machine, instruction, inputs: constant(
        instruction.params["data"], instruction.outputs[0].dtype
    ),
    "iota": lambda machine, instruction, inputs: tf.range(
        instruction.outputs[0].local[0].size, dtype=tf.int32
    ),
    "device_index": lambda machine, instruction, inputs: machine.index(instruction.params["axes"]),
}
