"""Compiled: the figures of a compiled program on one device, beside those that were planned."""

from __future__ import annotations

import collections
from collections.abc import Mapping
from dataclasses import dataclass

from meshdsl.lowering.costs.schedule import Schedule
from meshdsl.lowering.program import Instruction, SpmdProgram, wire_of


@dataclass(frozen=True)
class Compiled:
    """The compiler's figures for one device.

    Attributes:
        peak_bytes: the most bytes in use at once; the bytes that would be needed if the program
            does not fit.
        room_bytes: the bytes that the device has; None if the compiler does not report them.
        fits: whether the program fits into memory.
        sent: bytes on the wire per step, by kind of collective; None if they are not known.
        seconds: the wall time of compiling.
        processor_seconds: the time of compiling on all processors together.
        unread: the reason why `sent` is not known.
        schedule: the time of a step by the compiler's schedule; None if it is not known.
        untimed: the reason why `schedule` is not known.
    """

    peak_bytes: int
    room_bytes: int | None
    fits: bool
    sent: Mapping[str, float] | None
    seconds: float
    processor_seconds: float
    unread: str = ""
    schedule: Schedule | None = None
    untimed: str = ""


def planned(program: SpmdProgram) -> Mapping[str, float]:
    """Returns the bytes that one device sends per step, by kind, as `program.wire_bytes` counts."""

    def sent(instruction: Instruction) -> float:
        return wire_of(instruction, program.mesh)

    totals: dict[str, float] = collections.defaultdict(float)
    for instruction, times in program.block.counted(sent):
        if bytes_ := sent(instruction):
            totals[instruction.op] += times * bytes_
    return totals
