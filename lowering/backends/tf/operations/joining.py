"""Shards put together along a dim."""

from __future__ import annotations

from collections.abc import Mapping

import tensorflow as tf

from meshdsl.lowering.backends.tf.machine import Arrays, Emitter, Machine
from meshdsl.lowering.program import Instruction


def _concat(machine: Machine, instruction: Instruction, inputs: Arrays) -> tf.Tensor:
    at = instruction.outputs[0].local.position(instruction.params["dim"])
    return tf.concat(list(inputs), at)


EMITTERS: Mapping[str, Emitter] = {"concat": _concat}
