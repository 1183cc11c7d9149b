"""Schedules as CSV files, in the notation of PyTorch's torch.distributed.pipelining.

Line i has the row of stage i. A cell has an action (`actions.Action`), or it is empty. There is no
header. PyTorch writes and reads such files with `_dump_csv` and `_load_csv`, without sends
(`compute_only`) or with sends (`compute_comms`).

Guarantees: if each row has a cell, `parse(text(schedule))` has the rows of the schedule. It has the
same name if the caller gives it, and the same `chunks` and `microbatches` if each occurs in a cell.
"""

from __future__ import annotations

import csv
import io
import re
from pathlib import Path

from meshdsl.lowering.pipelines.actions import Action
from meshdsl.lowering.pipelines.schedule import Row, Schedule

_WITHOUT_CHUNK = re.compile(r"[FIWB]\d+")


def text(schedule: Schedule) -> str:
    """Returns the schedule as CSV."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerows([[action or "" for action in row] for row in schedule.rows])
    return file.getvalue()


def parse(content: str, name: str = "csv") -> Schedule:
    """Returns the schedule of a CSV text.

    Args:
        content: the text.
        name: the name of the schedule; errors quote it.

    Raises:
        ValueError: Some cells are not actions, or the text has no action. The message lists all
            wrong cells with line and column. Both start at 1, as in editors.
    """
    lines = list(csv.reader(io.StringIO(content.strip("\r\n") + "\n")))
    rows: list[Row] = []
    problems = []
    for number, line in enumerate(lines, 1):
        row: list[Action | None] = []
        for column, cell in enumerate(line, 1):
            try:
                row.append(Action.parse(cell) if cell.strip() else None)
            except ValueError as error:
                problems.append(f"line {number}, column {column}: {error}")
        rows.append(tuple(row))
    if problems:
        _check_numbered(lines, name)
        raise ValueError(f"schedule `{name}` has cells that are not actions:\n" + _list(problems))
    if not any(action for row in rows for action in row):
        raise ValueError(
            f"schedule `{name}` has no action. Write one line per stage, such as `0F0,0B0`"
        )
    return Schedule.of(rows, name)


def _check_numbered(lines: list[list[str]], name: str) -> None:
    """Raises one error for a table whose actions have no chunks, as in reports of one round."""
    cells = [cell.strip() for line in lines for cell in line if cell.strip()]
    bare = [cell for cell in cells if _WITHOUT_CHUNK.fullmatch(cell)]
    if len(bare) > 1:
        raise ValueError(
            f"schedule `{name}` has {len(bare)} actions without the number of their chunk, the "
            f"first one `{bare[0]}`: write it in front, such as `0{bare[0]}` for chunk 0 (with one "
            "chunk per stage, its number is that of the stage)"
        )


def read(path: str | Path) -> Schedule:
    """Returns the schedule of a CSV file. Its name is the path, as given.

    Raises:
        ValueError: The file cannot be read, or `parse` raises an error.
    """
    try:
        content = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"pipeline schedule {path} cannot be read: {getattr(error, 'strerror', None) or error}."
            " Give a CSV file with one line of actions per stage, such as `0F0,0B0`, or the name "
            "of a built-in schedule"
        ) from None
    return parse(content, str(path))


def write(schedule: Schedule, path: str | Path) -> None:
    """Writes the schedule as a CSV file."""
    Path(path).write_text(text(schedule), encoding="utf-8")


def _list(problems: list[str]) -> str:
    return "\n".join(f"  {n}. {problem}" for n, problem in enumerate(problems, 1))
