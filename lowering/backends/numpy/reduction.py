"""Reductions over named dims of one shard."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from meshdsl.lowering.backends.numpy.machine import Arrays, Emitter, Machine, wide
from meshdsl.lowering.program import Instruction


def _reduction(function: Any) -> Emitter:
    def emit(machine: Machine, instruction: Instruction, inputs: Arrays) -> np.ndarray:
        local = instruction.inputs[0].local
        at = tuple(local.position(n) + 1 for n in instruction.params["over"])
        x = wide(inputs[0])
        return function.reduce(x, axis=at, dtype=x.dtype).astype(instruction.outputs[0].dtype)

    return emit


def _arg(function: Any) -> Emitter:
    def emit(machine: Machine, instruction: Instruction, inputs: Arrays) -> np.ndarray:
        at = instruction.inputs[0].local.position(instruction.params["dim"]) + 1
        return function(wide(inputs[0]), axis=at).astype(np.int32)

    return emit


EMITTERS: Mapping[str, Emitter] = {
    "sum": _reduction(np.add),
    "prod": _reduction(np.multiply),
    "argmax": _arg(np.argmax),
    "argmin": _arg(np.argmin),
    "max": _reduction(np.maximum),
    "min": _reduction(np.minimum),
}
