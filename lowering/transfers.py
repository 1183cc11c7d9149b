"""Transfers: what is sent for one collective of a program, one message after the other.

Between GPUs, and on one switch, a collective is one transfer, also of several tensors. On a torus
of TPUs it is written tensor by tensor, and libtpu joins none of them (0.0.52, by its schedules):

* Gathers and scatters among `MANY` devices or more take two steps, within groups of neighbours and
  then across them, and one step for each axis if there are several: a gather on all chips of a
  three-dimensional torus would be an all_reduce (see `backends.jax.torus_moves`).
* Small tensors of a joined gather or scatter travel in one buffer, and so do small sums, for each
  of which the device would wait.
* A step whose result is smaller than a tile is an all_reduce, for which the device waits. So it
  does for an all_reduce of less than `Hardware.offloaded` bytes.

The steps send as many bytes together as one would. Backends write what this module says, and
simulations price it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from meshdsl.layouts.hardware import Hardware
from meshdsl.layouts.mesh import Mesh
from meshdsl.lowering.parameters import axes_of
from meshdsl.lowering.program import Instruction, Value, payload_bytes, wire_bytes, wire_of
from meshdsl.tracing.source import Source

MANY = 64  # the least number of devices that may be all chips of a torus
LANES = 128  # numbers in a row of a TPU's tile
TILE_COLUMN = 32  # bytes in a column of a tile: 8 numbers of 4 bytes, 16 of 2
TILE = LANES * TILE_COLUMN  # bytes
SUM = 64 * 2**10  # bytes of a sum from which on it does not share a buffer
SHARDED = ("all_gather", "reduce_scatter")


@dataclass(frozen=True)
class Step:
    """One step of a gather, in groups of devices along some axes.

    Attributes:
        devices: the size of a group.
        stride: how far its members are apart, in places along the axes.
    """

    axes: tuple[str, ...]
    devices: int
    stride: int = 1


def steps_of(mesh: Mesh, axes: Sequence[str], many: int = MANY) -> list[Step]:
    """Returns the steps of a gather on a torus; those of a scatter are the same, reversed.

    The first step is among neighbours: along the minor axes, or the minor part of a single axis.

    >>> [(step.devices, step.stride) for step in steps_of(Mesh.parse("data:64"), ["data"])]
    [(8, 1), (8, 8)]
    """
    names = tuple(axis for axis in axes if mesh.sizes[axis] > 1) or tuple(axes)
    size = mesh.extent(names)
    if size < many:
        return [Step(names, size)]
    if len(names) > 1:
        return [*steps_of(mesh, names[-1:], many), *steps_of(mesh, names[:-1], many)]
    inner = max(n for n in range(1, math.isqrt(size) + 1) if size % n == 0)
    if inner == 1:
        return [Step(names, size)]
    return [Step(names, inner), Step(names, size // inner, inner)]


def packed(parts: Sequence[Instruction]) -> list[int]:
    """Returns the numbers of the tensors of a joined collective that share a buffer on a torus."""
    small = [number for number, part in enumerate(parts) if _is_small(part)]
    return small if len(small) > 1 else []


def _is_small(part: Instruction) -> bool:
    """Whether a tensor of a joined collective takes a transfer's latency more than its bytes."""
    least = min(part.inputs[0].bytes, part.outputs[0].bytes)
    if part.op in SHARDED:
        return least < TILE
    return part.op == "all_reduce" and least < SUM


@dataclass(frozen=True, eq=False, slots=True)
class Transfer:
    """One message; two are equal if they are the same object.

    Attributes:
        kind: that of the collective.
        wire_bytes: the bytes that a device sends.
        alone: whether the device waits, though collectives of this kind travel beside work.
    """

    kind: str
    axes: tuple[str, ...]
    wire_bytes: float
    source: Source
    alone: bool = False


@dataclass(frozen=True, eq=False, slots=True)
class Chain:
    """Transfers that follow each other, and the tensors that they carry."""

    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    transfers: tuple[Transfer, ...]


def chains_of(collective: Instruction, mesh: Mesh, hardware: Hardware) -> tuple[Chain, ...]:
    """Returns what is sent for a collective; its chains do not need each other.

    chains_of(collective, Mesh.parse("data:64"), find_hardware("v5p"))
    """
    if not hardware.torus:
        return (in_one_transfer(collective, mesh),)
    parts = collective.parts
    together = packed(parts)
    groups = [[number] for number in range(len(parts)) if number not in together]
    if together:
        groups.insert(0, together)
    return tuple(
        _chain([parts[number] for number in group], mesh, hardware, len(group) > 1)
        for group in groups
    )


def in_one_transfer(collective: Instruction, mesh: Mesh) -> Chain:
    """Returns a collective as one transfer."""
    sent = Transfer(
        collective.op, axes_of(collective), wire_of(collective, mesh), collective.source
    )
    return Chain(collective.inputs, collective.outputs, (sent,))


def _chain(parts: Sequence[Instruction], mesh: Mesh, hardware: Hardware, fills: bool) -> Chain:
    """Returns what is sent for tensors that travel together; `fills`: in entire tiles."""
    op, axes = parts[0].op, axes_of(parts[0])
    payloads = [payload_bytes(part, mesh) for part in parts]
    payload = sum(payloads)
    source = parts[payloads.index(max(payloads))].source
    if op in SHARDED:
        sent = _in_steps(op, axes, payload, mesh, source, fills)
    else:
        alone = op == "all_reduce" and payload < hardware.offloaded
        wire = wire_bytes(op, payload, mesh.extent(axes))
        sent = [Transfer(op, axes, wire, source, alone)]
    inputs = tuple(value for part in parts for value in part.inputs)
    outputs = tuple(value for part in parts for value in part.outputs)
    return Chain(inputs, outputs, tuple(sent))


def _in_steps(
    op: str, axes: tuple[str, ...], payload: int, mesh: Mesh, source: Source, fills: bool
) -> list[Transfer]:
    """Returns the steps of a gather or a scatter of some bytes."""
    steps = steps_of(mesh, axes)
    if len(steps) == 1:
        steps = [Step(axes, mesh.extent(axes))]
    shard = payload / mesh.extent(axes)
    steps_sent: list[Transfer] = []
    for step in steps:  # as a gather takes them
        full = shard * step.devices
        result = full if op == "all_gather" else shard
        wire = wire_bytes(op, full, step.devices)
        steps_sent.append(Transfer(op, step.axes, wire, source, result < TILE and not fills))
        shard = full
    return steps_sent if op == "all_gather" else steps_sent[::-1]
