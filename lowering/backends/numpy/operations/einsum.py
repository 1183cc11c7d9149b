"""Products of named tensors."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from meshdsl.lowering.backends.arrange import equation
from meshdsl.lowering.backends.numpy.machine import Arrays, Emitter, Machine, wide
from meshdsl.lowering.program import Instruction


def _einsum(machine: Machine, instruction: Instruction, inputs: Arrays) -> np.ndarray:
    shapes = [v.local for v in instruction.inputs]
    (out,) = instruction.outputs
    letters = equation(shapes, out.local, batch="Z")
    return np.einsum(letters, *map(wide, inputs), optimize=len(inputs) > 1).astype(out.dtype)


EMITTERS: Mapping[str, Emitter] = {
    "einsum": _einsum,
}
