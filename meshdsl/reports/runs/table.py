"""Table: runs beside each other, the best first, with the settings in which they differ."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.table import Table
from rich.text import Text

from meshdsl.reports.runs.reading import RunHistory

# Every run has its own folder, and every process its own place in a job.
_NOT_A_DIFFERENCE = {"workdir", "coordinator", "process_id"}
_UNKNOWN = "unknown"  # of a run without `run.toml`


def ranked(runs: Sequence[RunHistory]) -> list[RunHistory]:
    """Returns runs by their last held-out loss, then by their last loss; NaN comes last."""

    def place(run: RunHistory) -> tuple[float, float, str]:
        return _or_infinite(run.last("eval_loss")), _or_infinite(run.last("loss")), run.name

    return sorted(runs, key=place)


def differences(
    runs: Sequence[RunHistory], defaults: Mapping[str, str | None]
) -> dict[str, list[str | None]]:
    """Returns the settings in which runs differ, each with its value in every run.

    Args:
        defaults: the values of settings that a run was not given; None: none.

    Returns:
        The values by setting; None: none, or unknown since the run has no settings.
    """
    names = {name for run in runs for name in run.settings or ()} - _NOT_A_DIFFERENCE
    known = [run.settings for run in runs if run.settings is not None]
    values = {name: [one.get(name, defaults.get(name)) for one in known] for name in sorted(names)}
    differing = [name for name, texts in values.items() if len(set(map(_value, texts))) > 1]
    return {
        name: [None if run.settings is None else run.settings.get(name, defaults.get(name))
               for run in runs]
        for name in differing
    }  # fmt: skip


def as_table(runs: Sequence[RunHistory], defaults: Mapping[str, str | None]) -> Table:
    """Returns runs for a terminal, without their settings; `defaults` as in `differences`."""
    grid = Table(box=None, pad_edge=False)
    grid.add_column("run", no_wrap=True)
    for head in ("step", "loss", "held-out", "tokens/s"):
        grid.add_column(head, justify="right", no_wrap=True)
    launched = any(run.losses for run in runs)
    if launched:
        grid.add_column("failures", justify="right", no_wrap=True)
    for run in runs:
        grid.add_row(
            Text(run.name),
            _steps(run, defaults),
            _number(run.last("loss"), ".4f"),
            _number(run.last("eval_loss"), ".4f"),
            _number(run.last("tokens_per_second"), ",.0f"),
            *[f"{run.losses.failures:,}" if run.losses else ""] * launched,
        )
    return grid


def settings_table(runs: Sequence[RunHistory], defaults: Mapping[str, str | None]) -> Table | None:
    """Returns the settings that differ, a row each, with a column for each run; None: none do."""
    differing = differences(runs, defaults)
    if not differing:
        return None
    grid = Table(box=None, pad_edge=False)
    grid.add_column("settings that differ", no_wrap=True)
    for run in runs:
        grid.add_column(Text(run.name), overflow="fold")
    for name, texts in differing.items():
        cells = [
            _UNKNOWN if run.settings is None else text or ""
            for run, text in zip(runs, texts, strict=True)
        ]
        grid.add_row(name, *map(Text, cells))
    return grid


def as_json(runs: Sequence[RunHistory], defaults: Mapping[str, str | None]) -> str:
    """Returns runs with all of their settings, their last report, and those that differ."""
    differing = list(differences(runs, defaults))
    listed: list[dict[str, Any]] = [
        {
            "run": run.name,
            "settings": None if run.settings is None else dict(run.settings),
            "last_report": dict(run.reports[-1]),
            "held_out_loss": run.last_written("eval_loss"),
            "failures": None if run.losses is None else asdict(run.losses),
        }
        for run in runs
    ]
    return json.dumps({"differing_settings": differing, "runs": listed}, indent=1)


def _steps(run: RunHistory, defaults: Mapping[str, str | None]) -> str:
    asked = (run.settings or {}).get("steps", defaults.get("steps") if run.settings else None)
    count = _value(asked)
    return f"{run.step:,}/{count:,.0f}" if isinstance(count, float) else f"{run.step:,}"


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _value(text: str | None) -> str | float | None:
    """Returns what a setting means: `3e-4` and `0.0003`, `1,000` and `1000` are one number."""
    try:
        return None if text is None else float(text.replace("_", "").replace(",", ""))
    except ValueError:
        return text


def _or_infinite(value: float | None) -> float:
    return math.inf if value is None or math.isnan(value) else value
