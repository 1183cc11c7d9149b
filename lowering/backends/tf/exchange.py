"""Windows of a split dim put together, and cut at places that differ by device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from meshdsl.lowering.backends.tf.machine import Arrays, Emitter, Machine, constant
from meshdsl.lowering.backends.tf.operations.slicing import padded, part, replaced
from meshdsl.lowering.program import Instruction


def _own(machine: Machine, table: Sequence[int], axes: Sequence[str]) -> Any:
    """Returns this device's entry of a table: a plain number where all are the same."""
    if len(set(table)) == 1:
        return table[0]
    return tf.gather(tf.constant(list(table), tf.int32), machine.index(axes))


def _assemble(machine: Machine, instruction: Instruction, inputs: Arrays) -> tf.Tensor:
    """Lays pieces into a window, each where it belongs, with `fill` in the rest."""
    params, (out,) = instruction.params, instruction.outputs
    at = out.local.position(params["dim"])
    length, axes = out.local[at].size, params["axes"]
    fill = constant(params["fill"], out.dtype)
    window = None
    column = [1] * len(out.local)
    column[at] = length
    index = np.arange(length, dtype=np.int32).reshape(column)
    for piece, (offsets, lows, highs) in zip(inputs, params["parts"], strict=True):
        aligned = _shifted(machine, piece, at, offsets, axes, length)
        low, high = _own(machine, lows, axes), _own(machine, highs, axes)
        if isinstance(low, int) and isinstance(high, int) and low <= 0 and high >= length:
            window = aligned
            continue
        inside = (tf.constant(index) >= low) & (tf.constant(index) < high)
        window = tf.where(inside, aligned, fill if window is None else window)
    return tf.broadcast_to(fill if window is None else window, out.local.sizes)


def _shifted(
    machine: Machine,
    piece: tf.Tensor,
    at: int,
    offsets: Sequence[int],
    axes: Sequence[str],
    length: int,
) -> tf.Tensor:
    """Returns `length` positions, of which the one at this device's offset is the piece's first."""
    size, (least, most) = piece.shape[at], (min(offsets), max(offsets))
    blank = tf.zeros([], piece.dtype)
    piece = padded(piece, at, most, length - size - least, blank)
    if least == most:
        return piece
    return part(piece, _own(machine, [most - offset for offset in offsets], axes), length, at)


def _local_slice(machine: Machine, instruction: Instruction, inputs: Arrays) -> tf.Tensor:
    params, (out,) = instruction.params, instruction.outputs
    at = out.local.position(params["dim"])
    return part(inputs[0], _own(machine, params["starts"], params["axes"]), out.local[at].size, at)


def _local_update(machine: Machine, instruction: Instruction, inputs: Arrays) -> tf.Tensor:
    (whole, piece), params = inputs, instruction.params
    (out,) = instruction.outputs
    whole = tf.broadcast_to(whole, out.local.sizes)
    at = out.local.position(params["dim"])
    start = _own(machine, params["starts"], params["axes"])
    return replaced(whole, tf.cast(piece, out.dtype), start, at)


EMITTERS: Mapping[str, Emitter] = {
    "assemble": _assemble,
    "local_slice": _local_slice,
    "local_update": _local_update,
}
