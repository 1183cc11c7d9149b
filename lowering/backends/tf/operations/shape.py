"""Instructions that only lay data out anew."""

from __future__ import annotations

from collections.abc import Mapping

import tensorflow as tf

from meshdsl.lowering.backends.tf.machine import Arrays, Emitter, Machine, align
from meshdsl.lowering.backends.tf.operations.slicing import part
from meshdsl.lowering.program import Instruction
from meshdsl.tensors.cuts import cut


def _broadcast(machine: Machine, instruction: Instruction, inputs: Arrays) -> tf.Tensor:
    (out,) = instruction.outputs
    aligned = align(inputs[0], instruction.inputs[0].local, out.local)
    return tf.broadcast_to(aligned, out.local.sizes)


def _slice(machine: Machine, instruction: Instruction, inputs: Arrays) -> tf.Tensor:
    if not instruction.params["axes"]:
        return inputs[0]
    (out,), axes = instruction.outputs, instruction.params["axes"]
    at = out.local.position(instruction.params["dim"])
    size = out.local[at].size
    blocks = cut(tf, inputs[0], at, machine.counts(axes))
    return part(blocks, machine.index(axes) * size, size, at)


EMITTERS: Mapping[str, Emitter] = {
    "reshape": lambda machine, instruction, inputs: tf.reshape(
        inputs[0], instruction.outputs[0].local.sizes
    ),
    "rename": lambda machine, instruction, inputs: inputs[0],
    "transpose": lambda machine, instruction, inputs: align(
        inputs[0], instruction.inputs[0].local, instruction.outputs[0].local
    ),
    "broadcast": _broadcast,
    "slice": _slice,
}
