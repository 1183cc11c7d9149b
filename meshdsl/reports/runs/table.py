"""Table: runs beside each other, the best first, with the settings in which they differ."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.cells import cell_len
from rich.table import Table
from rich.text import Text

from meshdsl.reports.runs.reading import RunHistory

# Every run has its own folder, and every process its own place in a job.
_NOT_A_DIFFERENCE = {"workdir", "coordinator", "process_id"}
_UNKNOWN = "unknown"  # of a run without `run.toml`
_NONE = "none"  # of a setting that a run does not have
_DIFFERING = "settings that differ"
_LEAST = 12  # characters to which a column is folded at most


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
    grid.add_column("run", overflow="fold")
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
            _number(run.median("tokens_per_second"), ",.0f"),
            *[f"{run.losses.failures:,}" if run.losses else ""] * launched,
        )
    return grid


def settings_table(
    runs: Sequence[RunHistory], defaults: Mapping[str, str | None], width: int | None = None
) -> Table | None:
    """Returns the settings that differ, with the value of every run; None: none do.

    It has a row for each setting and a column for each run, if these fit; else a row for each run
    and a column for each setting; else a row for each run, with all of its settings as text.

    Args:
        width: the characters of a line. None: as many as the table needs.
    """
    differing = differences(runs, defaults)
    if not differing:
        return None
    cells = {
        name: [
            _UNKNOWN if run.settings is None else _NONE if text is None else text
            for run, text in zip(runs, texts, strict=True)
        ]
        for name, texts in differing.items()
    }
    names = [run.name for run in runs]
    by_setting = [[_DIFFERING, *names], *([name, *texts] for name, texts in cells.items())]
    by_run = [["run", *cells], *map(list, zip(names, *cells.values(), strict=True))]
    for rows in (by_setting, by_run):
        if width is None or _fits(rows, width):
            return _grid(rows, whole=True)
    listed = [
        [run.name, _UNKNOWN if run.settings is None else _listed(cells, number)]
        for number, run in enumerate(runs)
    ]
    return _grid([["run", _DIFFERING], *listed])


def _fits(rows: Sequence[Sequence[str]], width: int) -> bool:
    """Whether a table can be read in a width: the first column whole, the others may be folded."""
    first, *others = (max(map(cell_len, column)) for column in zip(*rows, strict=True))
    return first + sum(2 + min(one, _LEAST) for one in others) <= width


def _grid(rows: Sequence[Sequence[str]], whole: bool = False) -> Table:
    """Returns a table; the first row has the heads. `whole`: the first column is not folded."""
    grid = Table(box=None, pad_edge=False)
    for number, head in enumerate(rows[0]):
        grid.add_column(Text(head), overflow="fold", no_wrap=whole and number == 0)
    for row in rows[1:]:
        grid.add_row(*map(Text, row))
    return grid


def _listed(cells: Mapping[str, Sequence[str]], number: int) -> str:
    return ", ".join(f"{name}={texts[number]}" for name, texts in cells.items())


def as_json(runs: Sequence[RunHistory], defaults: Mapping[str, str | None]) -> str:
    """Returns runs with their settings, last report and median speed, and what differs."""
    differing = list(differences(runs, defaults))
    listed: list[dict[str, Any]] = [
        {
            "run": run.name,
            "settings": None if run.settings is None else dict(run.settings),
            "last_report": dict(run.reports[-1]),
            "held_out_loss": run.last_written("eval_loss"),
            "median_tokens_per_second": run.median("tokens_per_second"),
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
