"""Windows of a split dim: assembled from pieces, and sliced at positions that differ by device.

numpy, the reference, has its own: there a position is a number for each device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from meshdsl.lowering.backends.common.arrange import permutation, permuted
from meshdsl.lowering.backends.common.machine import OneDeviceMachine
from meshdsl.lowering.backends.common.namespace import OneDevice
from meshdsl.lowering.backends.contract import Emitter
from meshdsl.lowering.parameters import (
    AlongDim,
    Assemble,
    LocalPositions,
    Update,
    axes_of,
    parameters_of,
)
from meshdsl.lowering.program import Instruction
from meshdsl.tensors.cuts import cut

Arrays = Sequence[Any]


def _slice(machine: OneDeviceMachine, instruction: Instruction, inputs: Arrays) -> Any:
    """Returns this device's block of a dim."""
    (out,), axes = instruction.outputs, axes_of(instruction)
    if not axes:
        return inputs[0]
    at = out.local.position(parameters_of(instruction, AlongDim)["dim"])
    size = out.local[at].size
    blocks = cut(machine.xp, inputs[0], at, machine.counts(axes))
    return machine.xp.slice_axis(blocks, machine.index(axes) * size, size, at)


def _own_entry(machine: OneDeviceMachine, table: Sequence[int], axes: Sequence[str]) -> Any:
    """Returns this device's entry of a table: a Python number if all entries are equal."""
    if len(set(table)) == 1:
        return table[0]
    return machine.xp.entry(table, machine.index(axes))


def _assemble(machine: OneDeviceMachine, instruction: Instruction, inputs: Arrays) -> Any:
    """Assembles a window from pieces; each has its own range, and the rest reads as `fill`."""
    xp, params, (out,) = machine.xp, parameters_of(instruction, Assemble), instruction.outputs
    at = out.local.position(params["dim"])
    length, axes = out.local[at].size, params["axes"]
    window = xp.asarray(params["fill"], out.dtype)
    column = [1] * len(out.local)
    column[at] = length
    index = xp.asarray(np.arange(length).reshape(column), np.dtype("int32"))
    for piece, (offsets, lows, highs) in zip(inputs, params["parts"], strict=True):
        aligned = _shifted(machine, piece, at, offsets, axes, length)
        low, high = _own_entry(machine, lows, axes), _own_entry(machine, highs, axes)
        if isinstance(low, int) and isinstance(high, int) and low <= 0 and high >= length:
            window = aligned
            continue
        window = xp.where((index >= low) & (index < high), aligned, window)
    return xp.broadcast_to(window, out.local.sizes)


def _shifted(
    machine: OneDeviceMachine,
    piece: Any,
    at: int,
    offsets: Sequence[int],
    axes: Sequence[str],
    length: int,
) -> Any:
    """Returns a piece in a window of `length` positions, from this device's offset on."""
    xp, size, least, most = machine.xp, piece.shape[at], min(offsets), max(offsets)
    piece = xp.pad_axis(piece, at, most, length - size - least, 0)
    if least == most:
        return piece
    start = _own_entry(machine, [most - offset for offset in offsets], axes)
    return xp.slice_axis(piece, start, length, at)


def _local_slice(machine: OneDeviceMachine, instruction: Instruction, inputs: Arrays) -> Any:
    """Returns a range of positions, from a start that depends on the device."""
    params, (out,) = parameters_of(instruction, LocalPositions), instruction.outputs
    at, start = (
        out.local.position(params["dim"]),
        _own_entry(machine, params["starts"], params["axes"]),
    )
    return machine.xp.slice_axis(inputs[0], start, out.local[at].size, at)


def _local_update(machine: OneDeviceMachine, instruction: Instruction, inputs: Arrays) -> Any:
    """Returns an operand with a piece, from a start that depends on the device."""
    xp, params, (out,) = machine.xp, parameters_of(instruction, LocalPositions), instruction.outputs
    target, piece = xp.broadcast_to(inputs[0], out.local.sizes), xp.astype(inputs[1], out.dtype)
    start = _own_entry(machine, params["starts"], params["axes"])
    return xp.update_axis(target, piece, start, out.local.position(params["dim"]))


def _update(machine: OneDeviceMachine, instruction: Instruction, inputs: Arrays) -> Any:
    """Returns an operand with a piece in it, from a start or at places that are an operand."""
    xp, (x, piece, start) = machine.xp, inputs
    if instruction.inputs[2].shape:
        piece, at = permuted_piece(xp, instruction, piece)
        return xp.put_axis(x, piece, start, at)
    piece, first, at = aligned_piece(xp, instruction, piece, start)
    # A piece that would exceed the dim changes nothing: the values there are written again.
    piece = xp.where(start == first, piece, xp.slice_axis(x, first, piece.shape[at], at))
    return xp.update_axis(x, piece, first, at)


def aligned_piece(
    xp: OneDevice, instruction: Instruction, piece: Any, start: Any
) -> tuple[Any, Any, int]:
    """Returns what an `update` writes, with the dims of what it writes to in their order.

    Returns:
        The piece; where it begins, which is `start` unless it would exceed the dim; and the
        position of the dim.
    """
    target = instruction.inputs[0].local
    piece, at = permuted_piece(xp, instruction, piece)
    first = xp.clip(start, 0, target[at].size - piece.shape[at])
    return piece, first, at


def permuted_piece(xp: OneDevice, instruction: Instruction, piece: Any) -> tuple[Any, int]:
    """Returns what an `update` writes, as of `aligned_piece`, and the position of the dim."""
    target, part, _ = (value.local for value in instruction.inputs)
    params = parameters_of(instruction, Update)
    dim, part_dim = params["dim"], params["part"]
    want = [part_dim if name == dim else name for name in target.names]
    return permuted(xp, piece, permutation(part.names, want)), target.position(dim)


EMITTERS: Mapping[str, Emitter] = {
    "assemble": _assemble,
    "local_slice": _local_slice,
    "local_update": _local_update,
    "slice": _slice,
    "update": _update,
}
