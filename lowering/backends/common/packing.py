"""How tensors of one collective travel in one buffer, side by side along its last axis.

numpy's collectives are the reference and use none of this.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from meshdsl.lowering.backends.common.machine import OneDeviceMachine
from meshdsl.lowering.parameters import axes_of
from meshdsl.lowering.program import Instruction
from meshdsl.tensors.cuts import cut, join

# (machine, one tensor's part of the collective, an array) -> the array laid out otherwise, or sent
Step = Callable[[Any, Instruction, Any], Any]


class Packing(NamedTuple):
    """What is done to each tensor before and after, and to the buffer in between."""

    pack: Step
    send: Step
    unpack: Step


def together(
    machine: OneDeviceMachine, packing: Packing, parts: Sequence[Instruction], arrays: Sequence[Any]
) -> list[Any]:
    """Moves some tensors in one buffer."""
    packed = [packing.pack(machine, part, x) for part, x in zip(parts, arrays, strict=True)]
    buffer = packed[0] if len(packed) == 1 else machine.xp.concat(packed, -1)
    moved = packing.send(machine, parts[0], buffer)
    pieces: Iterable[Any] = [moved]
    if len(packed) > 1:
        pieces = machine.xp.split(moved, [one.shape[-1] for one in packed], -1)
    return [packing.unpack(machine, part, piece) for part, piece in zip(parts, pieces, strict=True)]


def at(part: Instruction, dim: str) -> int:
    """Returns the position of the dim that a parameter names."""
    return part.inputs[0].local.position(part.params[dim])


def flat(machine: OneDeviceMachine, part: Instruction, x: Any) -> Any:
    """Returns an operand as a row."""
    return machine.xp.reshape(x, [-1])


def shaped(machine: OneDeviceMachine, part: Instruction, sent: Any) -> Any:
    """Returns what was received with the dims of the result."""
    return machine.xp.reshape(sent, part.outputs[0].local.sizes)


def blocks(dim: str) -> Step:
    """Returns what lays out, one row for each device, the blocks that a dim is cut into."""

    def pack(machine: OneDeviceMachine, part: Instruction, x: Any) -> Any:
        xp, place, counts = machine.xp, at(part, dim), machine.counts(axes_of(part))
        x, devices = cut(xp, x, place, counts), math.prod(counts)
        before, size, after = x.shape[:place], x.shape[place], x.shape[place + 1 :]
        x = xp.reshape(x, [*before, devices, size // devices, *after])
        return xp.reshape(xp.moveaxis(x, place, 0), [devices, math.prod(x.shape) // devices])

    return pack


def merged(dim: str) -> Step:
    """Returns what joins blocks that came from each device, one row each, along a dim."""

    def unpack(machine: OneDeviceMachine, part: Instruction, rows: Any) -> Any:
        xp, place, sizes = machine.xp, at(part, dim), list(part.inputs[0].local.sizes)
        counts, (out,) = machine.counts(axes_of(part)), part.outputs
        if part.op == "all_to_all":
            split = at(part, "split")
            sizes[split] = out.local[split].size
        pieces = xp.moveaxis(xp.reshape(rows, [rows.shape[0], *sizes]), 0, place)
        sizes[place] *= rows.shape[0]
        return join(xp, xp.reshape(pieces, sizes), place, counts, out.local[place].size)

    return unpack
