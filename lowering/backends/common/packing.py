"""Packing: the tensors of one collective are sent in one buffer, concatenated along its last axis.

A packed tensor is a row, [elements], or has a row for each device of a group: [devices, elements].
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

# (machine, one tensor's part of the collective, an array) -> the packed, sent or unpacked array
Step = Callable[[Any, Instruction, Any], Any]


class Packing(NamedTuple):
    """How a kind of collective packs its tensors, sends the buffer, and unpacks the results.

    Attributes:
        pack: applied to each tensor.
        send: applied to the buffer.
        unpack: applied to each tensor's part of the received buffer.
    """

    pack: Step
    send: Step
    unpack: Step


def send_packed(
    machine: OneDeviceMachine, packing: Packing, parts: Sequence[Instruction], arrays: Sequence[Any]
) -> list[Any]:
    """Returns the results of a collective of several tensors, sent in one buffer."""
    packed = [packing.pack(machine, part, x) for part, x in zip(parts, arrays, strict=True)]
    buffer = packed[0] if len(packed) == 1 else machine.xp.concat(packed, -1)
    received = packing.send(machine, parts[0], buffer)
    pieces: Iterable[Any] = [received]
    if len(packed) > 1:
        pieces = machine.xp.split(received, [row.shape[-1] for row in packed], -1)
    return [packing.unpack(machine, part, piece) for part, piece in zip(parts, pieces, strict=True)]


def position_of(part: Instruction, dim: str) -> int:
    """Returns the position of the dim that the parameter `dim` names."""
    return part.inputs[0].local.position(part.params[dim])


def flatten(machine: OneDeviceMachine, part: Instruction, x: Any) -> Any:
    """Packs an operand as one row."""
    return machine.xp.reshape(x, [-1])


def unflatten(machine: OneDeviceMachine, part: Instruction, row: Any) -> Any:
    """Unpacks a row to the dims of the result."""
    return machine.xp.reshape(row, part.outputs[0].local.sizes)


def pack_blocks(dim: str) -> Step:
    """Returns a step that packs the blocks of a dim, one row for each device: [devices, elements].

    Args:
        dim: the parameter that names the dim.
    """

    def pack(machine: OneDeviceMachine, part: Instruction, x: Any) -> Any:
        xp, at, counts = machine.xp, position_of(part, dim), machine.counts(axes_of(part))
        x, devices = cut(xp, x, at, counts), math.prod(counts)
        before, size, after = x.shape[:at], x.shape[at], x.shape[at + 1 :]
        x = xp.reshape(x, [*before, devices, size // devices, *after])
        return xp.reshape(xp.moveaxis(x, at, 0), [devices, math.prod(x.shape) // devices])

    return pack


def merge_blocks(dim: str) -> Step:
    """Returns a step that concatenates the rows of all devices, each a block, along a dim.

    Args:
        dim: the parameter that names the dim.
    """

    def unpack(machine: OneDeviceMachine, part: Instruction, rows: Any) -> Any:
        xp, at, sizes = machine.xp, position_of(part, dim), list(part.inputs[0].local.sizes)
        counts, (out,) = machine.counts(axes_of(part)), part.outputs
        if part.op == "all_to_all":
            split = position_of(part, "split")
            sizes[split] = out.local[split].size
        pieces = xp.moveaxis(xp.reshape(rows, [rows.shape[0], *sizes]), 0, at)
        sizes[at] *= rows.shape[0]
        return join(xp, xp.reshape(pieces, sizes), at, counts, out.local[at].size)

    return unpack
