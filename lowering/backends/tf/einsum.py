"""Products of named tensors."""

from __future__ import annotations

from collections.abc import Mapping

import tensorflow as tf

from meshdsl.lowering.backends.arrange import equation
from meshdsl.lowering.backends.tf.machine import Arrays, Emitter, Machine
from meshdsl.lowering.program import Instruction


def _einsum(machine: Machine, instruction: Instruction, inputs: Arrays) -> tf.Tensor:
    shapes = [v.local for v in instruction.inputs]
    return tf.einsum(equation(shapes, instruction.outputs[0].local), *inputs, optimize="optimal")


EMITTERS: Mapping[str, Emitter] = {
    "einsum": _einsum,
}
