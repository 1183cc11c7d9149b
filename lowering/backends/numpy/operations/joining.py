"""Shards put together along a dim."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from meshdsl.lowering.backends.numpy.machine import Arrays, Emitter, Machine
from meshdsl.lowering.program import Instruction


def _concat(machine: Machine, instruction: Instruction, inputs: Arrays) -> np.ndarray:
    at = instruction.outputs[0].local.position(instruction.params["dim"])
    return np.concatenate(list(inputs), at + 1)


EMITTERS: Mapping[str, Emitter] = {"concat": _concat}
