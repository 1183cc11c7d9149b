"""The record of a supervisor: `launch.jsonl` in the workdir, one line of JSON per event.

`started` has `start` (from 1), `processes`, `step` (of the newest checkpoint or copy) and, after a
failure, `down_seconds`. `stepped`, of the first process when the first step of a start is finished,
has `start`, `step`, `start_seconds` since the start, and after a failure `recovery_seconds` since
it. `failed` has `start`, `process`, `host`, `code`, `cause`, `step`, `seen_seconds` from the
process's end, or its lost host's last message, until that was seen, `ran_seconds` before it, and
`repeated_seconds`: those of steps since `step`, which are repeated. Its `time` is that end or
message. `renewed` has `start`, which was stopped so that other hosts take part. `compiled_ahead`
has `start`, in which all hosts have compiled the programs of one with fewer `processes`. `ended`
has `start` and `code`. All have `time`, in seconds since 1970.
"""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshdsl.training.checkpointing.copies.together import Together, newest_together
from meshdsl.training.checkpointing.newest import newest_saved

NAME = "launch.jsonl"


@dataclass(frozen=True)
class Losses:
    """What failures have cost a job.

    Attributes:
        failures: how many there were.
        repeated_seconds: the time of steps that were taken again.
        down_seconds: the time from failures until the processes were started again.
        recovery_seconds: the time from failures until the next step was finished.
    """

    failures: int = 0
    repeated_seconds: float = 0.0
    down_seconds: float = 0.0
    recovery_seconds: float = 0.0

    @property
    def seconds(self) -> float:
        return self.repeated_seconds + max(self.down_seconds, self.recovery_seconds)


@dataclass
class Events:
    """Writes the record of a supervisor. A disk that refuses is reported once."""

    file: Path
    _refused: bool = False

    def write(self, event: str, **facts: Any) -> None:
        line = json.dumps({"time": round(time.time(), 3), "event": event, **facts}) + "\n"
        try:
            with self.file.open("a", encoding="utf-8") as out:
                out.write(line)
        except OSError as error:
            if not self._refused:
                warnings.warn(f"cannot write to {self.file}: {error.strerror}", stacklevel=3)
            self._refused = True


def newest(workdir: Path, copies: Sequence[Together]) -> tuple[int, float] | None:
    """Returns the newest step that is saved or copied, and when, in seconds since 1970.

    Args:
        copies: what the hosts that are there hold of each step.
    """
    both = newest_saved(workdir), newest_together(copies)
    found = [one for one in both if one is not None]
    return max(found, default=None)


def repeated_seconds(
    failed: float,
    ran: float,
    stepped: tuple[float, float] | None,
    reached: tuple[int, float] | None,
) -> float:
    """Returns the time of a start's steps that a failure has lost.

    Args:
        failed: when that was, in seconds since 1970.
        ran: how long the start had run then, which bounds what a clock that jumps makes of it.
        stepped: what `first_step` returns of the start.
        reached: the newest step that the start has saved or copied, and when; None: there is none.
    """
    since = failed - ran if stepped is None else stepped[0]
    since = since if reached is None else reached[1]
    return min(max(failed - since, 0.0), max(ran, 0.0))


def losses(workdir: Path) -> Losses | None:
    """Returns what failures have cost a job by its record; None without a record."""
    file = workdir / NAME
    if not file.exists():
        return None
    failures, repeated, down, recovery = 0, 0.0, 0.0, 0.0
    for event in events_of(file):
        failures += event.get("event") == "failed"
        repeated += _number(event.get("repeated_seconds"))
        down += _number(event.get("down_seconds"))
        recovery += _number(event.get("recovery_seconds"))
    return Losses(failures, repeated, down, recovery)


def first_step(file: Path, start: int) -> tuple[float, float] | None:
    """Returns when the first step of the latest start of a number was finished, since 1970.

    The second is how long the recovery took that it ended. None: no step was finished, or the
    record cannot be read now. A healthy job must not end because of its record.
    """
    found = None
    for event in readable_events(file):
        if event.get("start") == start and event.get("event") == "started":
            found = None
        if event.get("start") == start and event.get("event") == "stepped":
            found = _number(event.get("time")), _number(event.get("recovery_seconds"))
    return found


def compiled_counts(file: Path) -> set[int]:
    """Returns for how many processes the programs of a job were compiled, by its record."""
    counts: set[int] = set()
    started = 0
    for event in readable_events(file):
        kind, processes = event.get("event"), event.get("processes")
        if kind == "started":
            counts = set() if event.get("start") == 1 else counts  # of an earlier command
            started = len(processes) if isinstance(processes, list) else 0
        elif kind == "stepped" and started:
            counts.add(started)
        elif kind == "compiled_ahead" and isinstance(processes, int):
            counts.add(processes)
    return counts


def readable_events(file: Path) -> list[Mapping[str, Any]]:
    """Returns the events of a record; none if it cannot be read now, or is not there."""
    try:
        return [*events_of(file)]
    except OSError:
        return []


def events_of(file: Path) -> Iterator[Mapping[str, Any]]:
    """Yields the events of a record, without what was cut off."""
    for line in file.read_bytes().splitlines():
        try:
            event = json.loads(line)
        except ValueError:  # it was cut off
            continue
        if isinstance(event, dict):
            yield event


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else 0.0
