"""Products of named tensors."""

from __future__ import annotations

from collections.abc import Mapping

import tensorflow as tf

from meshdsl.lowering.backends.arrange import equation
from meshdsl.lowering.backends.tf.machine import Arrays, Emitter, Machine
from meshdsl.lowering.program import Instruction


def _einsum(machine: Machine, instruction: Instruction, inputs: Arrays) -> tf.Tensor:
    """TensorFlow has no product that is wider than its factors, so these are made as wide."""
    shapes, (out,) = [v.local for v in instruction.inputs], instruction.outputs
    factors = [tf.cast(x, out.dtype) for x in inputs]
    return tf.einsum(equation(shapes, out.local), *factors, optimize="optimal")


EMITTERS: Mapping[str, Emitter] = {
    "einsum": _einsum,
}
