"""Where the time of a job went, over all its starts, by the record of its supervisor.

The first process of a start writes when its first step is finished. A recovery lasts from the first
failure since a step until then, whatever is started again meanwhile.

Goodput is the share of time in steps that count: how many there are, times how long one takes in
the start at hand. Steps that were taken again count once.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshdsl.training.launching.events import NAME, Events, events_of

START = "MESHDSL_LAUNCH_START"  # the variable by which a supervisor tells its processes the start


@dataclass
class JobTime:
    """The time of a job: `job_time(workdir)`, in a process that a supervisor has started.

    Attributes:
        events: the record, to which the end of the first step is added.
        start: the number of this start, from 1.
        began: when the job was started first, in seconds since 1970.
        first: the step that it went on from.
        started: when this start was.
        failed: when the first failure was after which no step was finished; None: there is none.
        repeated: seconds of steps that were taken again.
        recovered: seconds of the recoveries before this start.
    """

    events: Events
    start: int
    began: float
    first: int
    started: float
    failed: float | None = None
    repeated: float = 0.0
    recovered: float = 0.0
    clock: Callable[[], float] = time.time

    def stepped(self, step: int) -> None:
        """Says that the first step of this start is finished, `step` being the last one of it."""
        now = self.clock()
        facts = {"start_seconds": round(max(now - self.started, 0.0), 3)}
        if self.failed is not None:
            recovery = max(now - self.failed, 0.0)  # clocks jump
            facts["recovery_seconds"] = round(recovery, 3)
            self.recovered += recovery
            self.failed = None
        self.events.write("stepped", start=self.start, step=step, **facts)

    def shares(self, step: int, seconds: float) -> dict[str, float]:
        """Returns `goodput` and the shares of recoveries and of steps that were taken again.

        Args:
            step: how many steps the job has taken, with those before it began.
            seconds: how long a step takes.
        """
        total = self.clock() - self.began
        if total <= 0:
            return {}
        rest = total - self.recovered - self.repeated
        useful = max(min((step - self.first) * seconds, rest), 0.0)
        return {
            "goodput": useful / total,
            "recovering_share": self.recovered / total,
            "repeating_share": self.repeated / total,
        }

    def report(self, step: int, seconds: float) -> str:
        """Says where the time went, if there was a failure; arguments are those of `shares`."""
        shares = self.shares(step, seconds)
        if self.start == 1 or not shares:
            return ""
        words = {"goodput": "steps that count", "recovering_share": "recovering"}
        words["repeating_share"] = "steps taken again"
        said = [f"{100 * share:.1f} % {words[name]}" for name, share in shares.items()]
        return f"since the first of {self.start} starts: {', '.join(said)}"


def job_time(
    workdir: str | os.PathLike[str] | None, variables: Mapping[str, str] = os.environ
) -> JobTime | None:
    """Returns the time of the job; None in a process that no supervisor has started."""
    start = variables.get(START, "")
    if workdir is None or not start.isdecimal():
        return None
    file = Path(workdir).absolute() / NAME
    return _read(Events(file), int(start), events_of(file)) if file.exists() else None


def _read(record: Events, start: int, events: Iterable[Mapping[str, Any]]) -> JobTime:
    job = JobTime(record, start, now := time.time(), 0, now)
    for event in events:
        kind, at = event.get("event"), event.get("time")
        if not isinstance(at, int | float):
            continue
        if kind == "started":
            if event.get("start") == 1:
                job = JobTime(record, start, at, event.get("step") or 0, at)
            job.started = at
        elif kind == "failed":
            job.repeated += event.get("repeated_seconds") or 0.0
            job.failed = at if job.failed is None else job.failed
        elif kind == "stepped":
            job.recovered += event.get("recovery_seconds") or 0.0
            job.failed = None
    return job
