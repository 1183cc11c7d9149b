"""The user's own operations, run on one device after another."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from meshdsl.lowering.backends.numpy.machine import Arrays, Emitter, Machine
from meshdsl.lowering.backends.user_code import call
from meshdsl.lowering.parameters import Local, parameters_of
from meshdsl.lowering.program import Instruction


def _local(machine: Machine, instruction: Instruction, inputs: Arrays) -> list[np.ndarray]:
    function = parameters_of(instruction, Local)["definition"].emitter("numpy")
    rows = []
    for device in range(machine.mesh.size):
        results = call(instruction, function, [array[device] for array in inputs])
        rows.append([np.asarray(array) for array in results])
    return [np.stack(column) for column in zip(*rows, strict=True)]


EMITTERS: Mapping[str, Emitter] = {"local": _local}
