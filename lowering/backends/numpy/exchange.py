"""Windows of a split dim: assembled from pieces, and sliced at positions that differ by device."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from meshdsl.lowering.backends.numpy.machine import Arrays, Emitter, Machine
from meshdsl.lowering.parameters import AlongDim, Assemble, LocalPositions, axes_of, parameters_of
from meshdsl.lowering.program import Instruction
from meshdsl.tensors.cuts import cut


def _assemble(machine: Machine, instruction: Instruction, inputs: Arrays) -> np.ndarray:
    """Assembles a window from pieces; each has its own range, and the rest reads as `fill`."""
    params, (out,) = parameters_of(instruction, Assemble), instruction.outputs
    at = out.local.position(params["dim"])
    length = out.local[at].size
    window = np.full((machine.mesh.size, *out.local.sizes), params["fill"], out.dtype)
    index = machine.index(params["axes"])
    for piece, (offsets, lows, highs) in zip(inputs, params["parts"], strict=True):
        for device, number in enumerate(index):
            low, high = max(0, lows[number]), min(length, highs[number])
            if low < high:
                first = low - offsets[number]
                assert first >= 0 and first + high - low <= piece.shape[at + 1]
                rows = np.moveaxis(piece[device], at, 0)[first : first + high - low]
                np.moveaxis(window[device], at, 0)[low:high] = rows
    return window


def _local_slice(machine: Machine, instruction: Instruction, inputs: Arrays) -> np.ndarray:
    """Returns a range of positions, from a start that depends on the device."""
    params, (out,) = parameters_of(instruction, LocalPositions), instruction.outputs
    at = out.local.position(params["dim"])
    size = out.local[at].size
    rows = []
    for row, number in zip(inputs[0], machine.index(params["axes"]), strict=True):
        start = params["starts"][number]
        assert start >= 0 and start + size <= row.shape[at]
        rows.append(np.moveaxis(np.moveaxis(row, at, 0)[start : start + size], 0, at))
    return np.stack(rows)


def _local_update(machine: Machine, instruction: Instruction, inputs: Arrays) -> np.ndarray:
    """Returns an operand with a piece, from a start that depends on the device."""
    params, (target, pieces) = parameters_of(instruction, LocalPositions), inputs
    at = instruction.outputs[0].local.position(params["dim"])
    result = target.copy()
    for row, piece, number in zip(result, pieces, machine.index(params["axes"]), strict=True):
        start, size = params["starts"][number], piece.shape[at]
        assert start >= 0 and start + size <= row.shape[at]
        np.moveaxis(row, at, 0)[start : start + size] = np.moveaxis(piece, at, 0)
    return result


def _slice(machine: Machine, instruction: Instruction, inputs: Arrays) -> np.ndarray:
    """Returns each device's block of a dim."""
    axes, local = axes_of(instruction), instruction.inputs[0].local
    if not axes:
        return inputs[0]
    at = local.position(parameters_of(instruction, AlongDim)["dim"])
    blocks = cut(np, inputs[0], at + 1, machine.counts(axes))
    parts = np.split(blocks, machine.mesh.extent(axes), axis=at + 1)
    return np.stack([parts[i][device] for device, i in enumerate(machine.index(axes))])


EMITTERS: Mapping[str, Emitter] = {
    "assemble": _assemble,
    "local_slice": _local_slice,
    "local_update": _local_update,
    "slice": _slice,
}
