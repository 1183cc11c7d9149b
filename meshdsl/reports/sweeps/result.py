"""Result: what a sweep learns of one candidate, as one line of JSON.

Figures are those of one device and one step. A candidate that could not be measured has a reason
and no figures.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from meshdsl.lowering.costs.timeline import over
from meshdsl.lowering.program import Instruction, SpmdProgram, wire_of
from meshdsl.reports.explain.explanation import Explanation
from meshdsl.reports.explain.limits import what_limits
from meshdsl.reports.sweeps.candidates import Candidate


@dataclass(frozen=True)
class Result:
    """One row of a sweep.

    Attributes:
        topology: the machine that it is planned for, if one was asked for.
        reason: why there are no figures, if there are none.
        passing: whether the failure may have other causes than the candidate, so that it is worth
            another try.
        seconds: the time that ranks it: measured if `--measure=run`, else simulated.
        quartiles: of the measured times.
        estimated_seconds: simulated, as `explain` does for the hardware asked for.
        overlapped_seconds: as in `Timeline`, a bound from published peaks.
        limit: what takes most of the time at these peaks, in words.
        wire_bytes: what is sent, by mesh axes: `data`, or `data+model` if over both at once.
        peak_bytes: the peak of memory, by the compiler if one was asked, else by the plan.
        planned_peak_bytes: by the plan.
        fits: whether the peak is within the device's memory.
        compile_seconds: what the compiler took.
        notes: what lowering warned of.
        page: the file of the whole report, if one is written.
    """

    mesh: str
    layout: str
    topology: str = ""
    devices: int = 0
    reason: str = ""
    passing: bool = False
    seconds: float | None = None
    quartiles: tuple[float, float] | None = None
    estimated_seconds: float | None = None
    overlapped_seconds: float | None = None
    limit: str = ""
    wire_bytes: Mapping[str, float] = field(default_factory=dict)
    peak_bytes: int | None = None
    planned_peak_bytes: int | None = None
    fits: bool | None = None
    compile_seconds: float | None = None
    notes: tuple[str, ...] = ()
    page: str = ""

    @property
    def candidate(self) -> Candidate:
        return Candidate(self.mesh, self.layout, self.topology)

    @property
    def device_seconds(self) -> float:
        """The time of a step times its devices: what it costs, on machines of any size."""
        return (self.seconds or 0.0) * self.devices

    @property
    def wire(self) -> float:
        """What is sent over all axes."""
        return math.fsum(self.wire_bytes.values())

    def as_json(self) -> str:
        """Returns it as one line."""
        return json.dumps(asdict(self), ensure_ascii=False, allow_nan=False)

    @staticmethod
    def of_json(record: Mapping[str, Any]) -> Result:
        """Returns what `as_json` wrote.

        Raises:
            TypeError: it is something else.
        """
        names = {field.name for field in fields(Result)}
        if set(record) != names:
            raise TypeError(f"a result has {sorted(names)}, not {sorted(record)}")
        quartiles = record["quartiles"] and tuple(record["quartiles"])
        return Result(**{**record, "quartiles": quartiles, "notes": tuple(record["notes"])})


def planned(candidate: Candidate, report: Explanation, program: SpmdProgram, room: int) -> Result:
    """Returns the plan's figures for a candidate.

    Args:
        room: bytes that a device may hold.
    """
    timeline = report.timeline
    return Result(
        mesh=candidate.mesh,
        layout=candidate.layout,
        topology=candidate.topology,
        devices=program.mesh.size,
        seconds=report.simulated.seconds,
        estimated_seconds=report.simulated.seconds,
        overlapped_seconds=timeline.overlapped_seconds,
        limit=what_limits(timeline),
        wire_bytes=sent_over(program),
        peak_bytes=report.memory.peak_bytes,
        planned_peak_bytes=report.memory.peak_bytes,
        fits=report.memory.peak_bytes <= room,
    )


def sent_over(program: SpmdProgram) -> dict[str, float]:
    """Returns what one device sends, by mesh axes; together it is `program.wire_bytes`."""
    mesh = program.mesh

    def sent(one: Instruction) -> float:
        return wire_of(one, mesh)

    sent_bytes: dict[str, float] = {}
    for one, times in program.block.counted(sent):
        count = times * sent(one)
        if count:
            axes = over(one.params["axes"], mesh).removeprefix("over ")
            sent_bytes[axes] = sent_bytes.get(axes, 0.0) + count
    return dict(sorted(sent_bytes.items()))
