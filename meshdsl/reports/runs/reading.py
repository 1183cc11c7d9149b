"""Reading: the runs below some folders, each with its settings and its reports.

A run's folder has `metrics.jsonl`, and `run.toml` if the command line started it. Those of earlier
runs in the same folder are `metrics.1.jsonl` and `run.1.toml`, and so on. Nothing is changed.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import tomllib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshdsl.tensors.dims import did_you_mean
from meshdsl.training.launching.events import Losses, losses

_OF_RUN = {"checkpoints", "tensorboard", "profile", "compiled"}
_METRICS = re.compile(r"metrics(?:\.(\d+))?\.jsonl")


@dataclass(frozen=True)
class RunHistory:
    """What one run has written.

    Attributes:
        name: its folder as the user wrote it; of an earlier run with its number, `runs/first (1)`.
        settings: the flags that were given, as texts; None: unknown.
        reports: the lines of its metrics, by key, oldest first.
        losses: what failures have cost it, if `meshdsl launch` started it.
    """

    name: str
    settings: Mapping[str, str] | None
    reports: tuple[Mapping[str, Any], ...]
    losses: Losses | None = None

    @property
    def step(self) -> int:
        """How many steps it has taken."""
        return int(self.reports[-1]["step"])

    def last(self, metric: str) -> float | None:
        """Returns the last value of a metric that is not null."""
        value = self.last_written(metric)
        return None if value is None else float(value)

    def last_written(self, metric: str) -> float | str | None:
        """Returns the same as its report has it: "NaN" is a text there."""
        values = (report.get(metric) for report in reversed(self.reports))
        return next((value for value in values if value is not None), None)

    def median(self, metric: str) -> float | None:
        """Returns the median of a metric over the reports that have it."""
        values = [float(r[metric]) for r in self.reports if r.get(metric) is not None]
        return statistics.median(values) if values else None

    def curve(self, metric: str) -> tuple[list[int], list[float]]:
        """Returns the steps at which a metric was reported, and its values."""
        points = [(r["step"], float(r[metric])) for r in self.reports if r.get(metric) is not None]
        return [int(step) for step, _ in points], [value for _, value in points]


def runs_below(places: Sequence[str]) -> list[RunHistory]:
    """Returns the runs in folders and in all folders below them, in the order of their names.

    Warns of lines that are no reports.

    Raises:
        ValueError: a folder is not there, or has no run.
    """
    runs: dict[Path, RunHistory] = {}
    for place in places:
        if not Path(place).is_dir():
            near = [path.name for path in _siblings(Path(place))]
            raise ValueError(f"{place} is not a folder{did_you_mean(Path(place).name, near)}")
        files = [file for folder in _folders(place) for file in _metrics_of(folder)]
        below = {file.resolve(): run for file in files if (run := _read(file)) is not None}
        if not below:
            raise ValueError(
                f"{place} has no run: no folder in it has a metrics.jsonl with reports. "
                "`meshdsl train --workdir=runs/first` writes one"
            )
        runs |= below
    return sorted(runs.values(), key=lambda run: run.name)


def _siblings(place: Path) -> Iterator[Path]:
    if place.parent.is_dir():
        yield from (path for path in place.parent.iterdir() if path.is_dir())


def _folders(place: str) -> Iterator[Path]:
    """Yields a folder and those below it."""
    for folder, below, files in os.walk(place):
        if "metrics.jsonl" in files:  # what belongs to the run can have very many files
            below[:] = [n for n in below if n.split(".")[0] not in _OF_RUN]
        yield Path(folder)


def _metrics_of(folder: Path) -> list[Path]:
    return [file for file in folder.glob("metrics*.jsonl") if _METRICS.fullmatch(file.name)]


def _read(file: Path) -> RunHistory | None:
    """Returns the run of a file of metrics, if that has reports."""
    match = _METRICS.fullmatch(file.name)
    assert match is not None
    number = match[1]
    name = f"{file.parent} ({number})" if number else str(file.parent)
    reports, lost = [], 0
    for line in file.read_bytes().splitlines():
        try:
            report = json.loads(line)
            reports.append({**report, "step": int(report["step"])})
        except (ValueError, KeyError, TypeError):
            lost += 1
    if lost:
        warnings.warn(f"{lost} lines of {file} are no reports; they are left out", stacklevel=3)
    settings = file.with_name(f"run.{number}.toml" if number else "run.toml")
    if not reports:
        return None
    lost_time = None if number else losses(file.parent)  # its record is of the latest run
    return RunHistory(name, _settings(settings), tuple(reports), lost_time)


def _settings(file: Path) -> dict[str, str] | None:
    if not file.exists():
        return None
    try:
        values = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        warnings.warn(f"{file} cannot be read: {error}", stacklevel=4)
        return None
    return {name: _text(value) for name, value in values.items()}


def _text(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(_text, value))
    return str(value).lower() if isinstance(value, bool) else str(value)
