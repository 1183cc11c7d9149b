"""Windows of a split dim put together, and cut at places that differ by device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from meshdsl.lowering.backends.jax.machine import Arrays, Emitter, Machine, device_index
from meshdsl.lowering.program import Instruction


def _own(table: Sequence[int], axes: Sequence[str]) -> Any:
    """Returns this device's entry of a table: a plain number where all are the same."""
    if len(set(table)) == 1:
        return table[0]
    return jnp.asarray(table, jnp.int32)[device_index(axes)]


def _assemble(machine: Machine, instruction: Instruction, inputs: Arrays) -> Any:
    """Lays pieces into a window, each where it belongs, with `fill` in the rest."""
    params, (out,) = instruction.params, instruction.outputs
    at = out.local.position(params["dim"])
    length = out.local[at].size
    axes = params["axes"]
    window = None
    column = [1] * len(out.local)
    column[at] = length
    index = np.arange(length, dtype=np.int32).reshape(column)
    for piece, (offsets, lows, highs) in zip(inputs, params["parts"], strict=True):
        aligned = _shifted(piece, at, offsets, axes, length)
        low, high = _own(lows, axes), _own(highs, axes)
        if isinstance(low, int) and isinstance(high, int) and low <= 0 and high >= length:
            window = aligned
            continue
        if window is None:
            window = jnp.full((), params["fill"], out.dtype)
        window = jnp.where((index >= low) & (index < high), aligned, window)
    if window is None:
        window = jnp.full((), params["fill"], out.dtype)
    return jnp.broadcast_to(window, out.local.sizes)


def _shifted(piece: Any, at: int, offsets: Sequence[int], axes: Sequence[str], length: int) -> Any:
    """Returns `length` positions, of which the one at this device's offset is the piece's first."""
    size, (least, most) = piece.shape[at], (min(offsets), max(offsets))
    pads = [(0, 0, 0)] * piece.ndim
    pads[at] = (most, length - size - least, 0)
    if any(pads[at]):
        piece = lax.pad(piece, np.zeros((), piece.dtype), pads)
    if least == most:
        return piece
    starts = [most - offset for offset in offsets]
    return lax.dynamic_slice_in_dim(piece, _own(starts, axes), length, at)


def _local_slice(machine: Machine, instruction: Instruction, inputs: Arrays) -> Any:
    params, (out,) = instruction.params, instruction.outputs
    at = out.local.position(params["dim"])
    start, size = _own(params["starts"], params["axes"]), out.local[at].size
    if isinstance(start, int):
        return lax.slice_in_dim(inputs[0], start, start + size, axis=at)
    return lax.dynamic_slice_in_dim(inputs[0], start, size, at)


def _local_update(machine: Machine, instruction: Instruction, inputs: Arrays) -> Any:
    (whole, piece), params = inputs, instruction.params
    (out,) = instruction.outputs
    whole = jnp.broadcast_to(whole, out.local.sizes)
    start = _own(params["starts"], params["axes"])
    at = out.local.position(params["dim"])
    return lax.dynamic_update_slice_in_dim(whole, piece.astype(out.dtype), start, at)


EMITTERS: Mapping[str, Emitter] = {
    "assemble": _assemble,
    "local_slice": _local_slice,
    "local_update": _local_update,
}
