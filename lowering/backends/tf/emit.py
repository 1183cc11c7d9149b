"""Emits a program into TensorFlow's current graph."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from meshdsl.lowering.backends.tf.emitters import EMITTERS
from meshdsl.lowering.backends.tf.machine import Links, Machine
from meshdsl.lowering.backends.tf.namespace import tf_dtype
from meshdsl.lowering.program import Instruction, SpmdProgram, Value


def run(
    program: SpmdProgram,
    links: Links,
    device: tf.Tensor,
    shards: Sequence[tf.Tensor],
    instructions: list[Instruction],
) -> list[tf.Tensor]:
    """Emits a program for one device into the current graph, and returns its results.

    Args:
        device: the number of the device, an s32 scalar.
        instructions: receives all instructions, in the order in which they are emitted.
    """
    machine = Machine(program.mesh, EMITTERS, links, device, instructions)
    return [tf.identity(result) for result in machine.run(program.block, shards)]


def specs(values: Sequence[Value]) -> list[tf.TensorSpec]:
    """Returns the shapes and dtypes of one device's shards."""
    return [tf.TensorSpec(value.local.sizes, tf_dtype(value.dtype)) for value in values]
