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
        return function.reduce(x, axis=at, dtype=x.dtype).astype(inputs[0].dtype)

    return emit


EMITTERS: Mapping[str, Emitter] = {
    "sum": _reduction(np.add),
    "max": _reduction(np.maximum),
    "min": _reduction(np.minimum),
}
