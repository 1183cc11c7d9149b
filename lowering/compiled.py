"""Compiled: what a compiler made of a program for a machine, beside what was planned for it."""

from __future__ import annotations

import collections
from collections.abc import Mapping
from dataclasses import dataclass

from meshdsl.lowering.parameters import axes_of
from meshdsl.lowering.program import Instruction, SpmdProgram, payload_bytes, wire_bytes


@dataclass(frozen=True)
class Compiled:
    """A compiler's account of one device; without a compiler there is none.

    Attributes:
        peak_bytes: the most that is held at once; all that would be needed, if it does not fit.
        room_bytes: what there is, where the compiler says so.
        fits: whether the compiler found room for everything.
        sent: bytes on the wire per step, by kind of collective; None where that is not known, for
            the reason `unread`.
        seconds: what compiling took, by the clock.
        processor_seconds: the same on all processors together.
    """

    peak_bytes: int
    room_bytes: int | None
    fits: bool
    sent: Mapping[str, float] | None
    seconds: float
    processor_seconds: float
    unread: str = ""


def planned(program: SpmdProgram) -> Mapping[str, float]:
    """Returns the bytes that one device sends per step, by kind, as `program.wire_bytes` counts."""

    def sent(one: Instruction) -> float:
        if not one.is_collective:
            return 0.0
        devices = program.mesh.extent(axes_of(one))
        return wire_bytes(one.op, payload_bytes(one, program.mesh), devices)

    found: dict[str, float] = collections.defaultdict(float)
    for one, times in program.block.counted(sent):
        if bytes_ := sent(one):
            found[one.op] += times * bytes_
    return found
