"""Look-up by index, and adding up by index."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from meshdsl.dims import Shape
from meshdsl.lowering.backends.numpy.machine import Arrays, Emitter, Machine, align
from meshdsl.lowering.program import Instruction


def _take(machine: Machine, instruction: Instruction, inputs: Arrays) -> np.ndarray:
    table, indices = inputs
    at = instruction.inputs[0].local.position(instruction.params["dim"])
    rows = np.moveaxis(table, at + 1, 1)
    inside = (indices >= 0) & (indices < rows.shape[1])
    safe = np.where(inside, indices, 0)
    found = np.stack([row[index] for row, index in zip(rows, safe, strict=True)])
    mask = inside.reshape(*inside.shape, *(1,) * (rows.ndim - 2))
    return np.where(mask, found, np.zeros((), found.dtype))


def _scatter_add(machine: Machine, instruction: Instruction, inputs: Arrays) -> np.ndarray:
    updates, indices = inputs
    (out,) = instruction.outputs
    names = instruction.inputs[1].local.names
    rest = out.local.without([instruction.params["dim"]])
    ordered = Shape([*instruction.inputs[1].local, *rest])
    updates = align(updates, instruction.inputs[0].local, ordered)
    at = out.local.position(instruction.params["dim"])
    result = np.zeros((machine.mesh.size, *out.local.sizes), out.dtype)
    rows = np.moveaxis(result, at + 1, 1)
    assert names == ordered.names[: len(names)]
    for row, index, update in zip(rows, indices, updates, strict=True):
        inside = (index >= 0) & (index < row.shape[0])
        np.add.at(row, index[inside], update[inside])
    return result


EMITTERS: Mapping[str, Emitter] = {
    "take": _take,
    "scatter_add": _scatter_add,
}
