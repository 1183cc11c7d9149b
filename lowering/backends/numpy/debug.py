"""Printing: the numbers of the first device."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from meshdsl.lowering.backends.numpy.machine import Arrays, Emitter, Machine
from meshdsl.lowering.parameters import Print, parameters_of
from meshdsl.lowering.program import Instruction


def _print(machine: Machine, instruction: Instruction, inputs: Arrays) -> np.ndarray:
    message = parameters_of(instruction, Print)["message"]
    print(message.text([rows[0] for rows in inputs]), flush=True)
    return np.zeros(machine.mesh.size, np.int32)


EMITTERS: Mapping[str, Emitter] = {"print": _print}
