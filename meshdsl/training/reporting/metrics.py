"""The reports of a training run: metrics on disk, and progress on the terminal.

Guarantees:
    Every line of `metrics.jsonl` is a complete JSON object, however the run ends: a line is written
    in one unbuffered write, and removed again if a full disk cuts it off.
    A run never adds to the metrics of another. Those of earlier runs in the same folder are renamed
    to `metrics.1.jsonl`, `run.1.toml` and `tensorboard.1`, `metrics.2.jsonl` and so on, oldest
    first. A run that goes on from a checkpoint keeps its own metrics up to the checkpoint's step.
    No thread is started, so nothing competes with the training loop or outlives it.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import socket
import sys
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from io import FileIO
from pathlib import Path
from typing import Self, SupportsFloat, TypeAlias

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.proto.summary_pb2 import Summary
from tensorboardX.record_writer import RecordWriter

from meshdsl.training.reporting.output import hush
from meshdsl.training.step_metrics import KEYS

Metrics: TypeAlias = Mapping[str, SupportsFloat | None]


class MetricsWarning(UserWarning):
    """Metrics of earlier steps are missing."""


class MetricsWriter:
    """Writes `metrics.jsonl`, `run.toml` and `tensorboard` in a folder; closed by its with-block.

    A line starts with `KEYS`, in this order, and goes on with the run's own metrics; an absent
    value is null. JSON has no NaN and no infinities: they are the strings "NaN", "Infinity" and
    "-Infinity", which Python's `float` reads back.

    Args:
        begun: the step that the run goes on from; lines of later steps are dropped, since these
            steps are taken again.
        reports: how many lines there were at that step. If some are missing, it warns. None:
            unknown.
        settings: the settings of the run as TOML, kept in `run.toml`. None: they are not kept.

    Raises:
        ValueError: the folder cannot be written to.
    """

    def __init__(
        self,
        workdir: str | os.PathLike[str],
        begun: int = 0,
        reports: int | None = None,
        settings: str | None = None,
    ) -> None:
        self._folder = folder = Path(workdir).absolute()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if begun:
                steps = _drop_later_lines(folder / "metrics.jsonl", begun)
                _warn_of_gap(folder / "metrics.jsonl", steps, begun, reports or 0)
            else:
                _set_aside_earlier_run(folder)
            if settings is None:  # those of an earlier command would be shown as this run's
                (folder / "run.toml").unlink(missing_ok=True)
            else:
                (folder / "run.toml").write_text(settings, encoding="utf-8")
            (folder / "tensorboard").mkdir(exist_ok=bool(begun))
            name = f"events.{begun}.out.tfevents.{int(time.time())}.{socket.gethostname()}"
            self._events = RecordWriter(str(folder / "tensorboard" / name))
            self._add(Event(wall_time=time.time(), file_version="brain.Event:2"))
            if begun:  # viewers drop what was shown of later steps
                started = SessionLog(status=SessionLog.START)
                now = time.time()
                self._add(Event(step=begun + 1, wall_time=now, session_log=started))
            self._lines = (folder / "metrics.jsonl").open("ab", buffering=0)
        except OSError as error:
            raise ValueError(
                f"cannot write metrics to {folder}: {error.strerror}. Choose another workdir"
            ) from error

    def write(self, step: int, metrics: Metrics) -> None:
        """Adds one line, and one point to each curve; both are on disk on return.

        Raises:
            ValueError: they cannot be written; what was written before is complete.
        """
        values = {name: None if v is None else _number(v) for name, v in metrics.items()}
        line = dict.fromkeys(KEYS) | values | {"step": step}
        text = json.dumps({name: _finite(value) for name, value in line.items()}, allow_nan=False)
        points = [Summary.Value(tag=n, simple_value=v) for n, v in values.items() if v is not None]
        event = Event(step=step, wall_time=time.time(), summary=Summary(value=points))
        with self._writing_to("metrics.jsonl"):
            _append(self._lines, text.encode() + b"\n")
        with self._writing_to("tensorboard"):
            self._add(event)
            self._events.flush()

    def _add(self, event: Event) -> None:
        self._events.write(event.SerializeToString())

    def close(self) -> None:
        """Closes the files.

        Raises:
            ValueError: their last part cannot be written.
        """
        self._lines.close()
        with self._writing_to("tensorboard"):
            self._events.close()

    @contextmanager
    def _writing_to(self, name: str) -> Iterator[None]:
        """Turns an OSError of its block into a ValueError of one line."""
        try:
            yield
        except OSError as error:
            raise ValueError(
                f"cannot write metrics to {self._folder / name}: {error.strerror}. Those before "
                "are complete; make room, and start again to go on from the last checkpoint"
            ) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        with suppress(ValueError) if error[0] else nullcontext():  # the first error is the one
            self.close()


def _append(file: FileIO, data: bytes) -> None:
    """Adds bytes to a file, all of them or none."""
    end, left = os.fstat(file.fileno()).st_size, memoryview(data)
    try:
        while left:
            left = left[file.write(left) :]
    except BaseException:
        file.truncate(end)
        raise


def _set_aside_earlier_run(folder: Path) -> None:
    """Renames the metrics of an earlier run by the first free number."""
    for number in itertools.count(1):
        renamed = {
            folder / "metrics.jsonl": folder / f"metrics.{number}.jsonl",
            folder / "run.toml": folder / f"run.{number}.toml",
            folder / "tensorboard": folder / f"tensorboard.{number}",
        }
        if not any(path.exists() for path in renamed.values()):
            break
    for path, aside in renamed.items():
        if path.exists():
            path.rename(aside)


def _warn_of_gap(file: Path, steps: list[int], begun: int, reports: int) -> None:
    """Warns if lines are missing; the warning has the widest gap."""
    if len(steps) >= reports:
        return
    gaps = itertools.pairwise([0, *sorted(steps), begun])
    start, stop = max(gaps, key=lambda gap: gap[1] - gap[0])
    warnings.warn(
        f"{file} has {len(steps):,} of the {reports:,} reports up to step {begun:,}, from which "
        f"the run goes on; the widest gap is from step {start:,} to {stop:,}",
        MetricsWarning,
        stacklevel=4,
    )


def _drop_later_lines(file: Path, step: int) -> list[int]:
    """Keeps only the complete lines of steps up to `step`.

    Returns:
        The steps of the lines that are left.
    """
    if not file.exists():
        return []
    lines, steps = [], []
    for line in file.read_bytes().splitlines(keepends=True):
        try:
            if (step_of_line := json.loads(line)["step"]) <= step:
                lines.append(line)
                steps.append(int(step_of_line))
        except (ValueError, KeyError, TypeError):
            continue
    aside = file.with_suffix(".part")
    aside.write_bytes(b"".join(lines))
    os.replace(aside, file)
    return steps


def _number(value: SupportsFloat) -> int | float:
    return value if isinstance(value, int) else float(value)


def _finite(value: int | float | None) -> int | float | str | None:
    if value is None or math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


# The metrics that a line shows, each in a column of its own; other metrics follow by name.
_COLUMNS = {
    "loss": "loss {:5.3f}",
    "eval_loss": "eval {:5.3f}",
    "learning_rate": "lr {:7.1e}",
    "grad_norm": "grad_norm {:5.2f}",
    "tokens_per_second": "{:>9,.0f} tokens/s",
}
# Metrics that follow these if they are known and not 0.
_AT_TIMES = {"skipped_steps": "skipped {:,.0f}", "mfu": "mfu {:5.1%}", "test_loss": "test {:5.3f}"}
_IN_BAR = ("loss", "eval_loss", "tokens_per_second")


class Progress:
    """Shows progress: a bar on a terminal, one aligned line per report elsewhere.

    On a terminal the lines with an `eval_loss` stay above the bar, as the run's history. If the
    output is closed, it shows nothing from then on, and the run goes on.

    Args:
        steps: the number of steps in the run.
        console: where to show it. None: standard output.
    """

    def __init__(self, steps: int, console: Console | None = None) -> None:
        self._steps = steps
        self._console = console or Console()
        self._latest: dict[str, SupportsFloat] = {}
        self._bar: Bar | None = None
        if self._console.is_interactive:
            self._bar = Bar(
                TextColumn("step {task.completed}/{task.total}"),
                BarColumn(bar_width=None),
                TimeRemainingColumn(compact=True),
                TextColumn("{task.fields[metrics]}"),
                console=self._console,
                expand=True,
                auto_refresh=False,
            )
            self._task = self._bar.add_task("", total=steps, metrics="")

    def log(self, step: int, metrics: Metrics) -> None:
        """Reports the metrics of a step; those that are None or absent leave their column blank."""
        with self._shown():
            if self._bar is None:
                self._print(_line(step, self._steps, metrics))
                return
            self._latest |= {name: value for name, value in metrics.items() if value is not None}
            shown = [name for name in _IN_BAR if name in self._latest]
            text = "  ".join(_COLUMNS[name].format(float(self._latest[name])) for name in shown)
            self._bar.update(self._task, completed=step, metrics=text, refresh=True)
            if metrics.get("eval_loss") is not None:
                self._print(_line(step, self._steps, metrics))

    @contextmanager
    def _shown(self) -> Iterator[None]:
        """Shows something in its block; if that fails, nothing is shown any more."""
        try:
            yield
        except (OSError, SystemExit) as error:
            # Rich ends the process when the reader has gone; others who do so have their reasons.
            if isinstance(error, SystemExit) and not isinstance(error.__context__, BrokenPipeError):
                raise
            self._console.quiet = True
            hush(sys.stdout)

    def _print(self, line: str) -> None:
        self._console.print(line, markup=False, emoji=False, highlight=False, soft_wrap=True)

    def __enter__(self) -> Self:
        if self._bar is not None:
            with self._shown():
                self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            with self._shown():
                self._bar.stop()


def _line(step: int, steps: int, metrics: Metrics) -> str:
    parts = [f"step {step:>{len(str(steps))}}/{steps}"]
    for name, column in _COLUMNS.items():
        value = metrics.get(name)
        parts.append(
            " " * len(column.format(0.0)) if value is None else column.format(float(value))
        )
    for name, shown in _AT_TIMES.items():
        value = metrics.get(name)
        if value:
            parts.append(shown.format(float(value)))
    for name, value in metrics.items():
        if value is not None and name not in _COLUMNS and name not in KEYS:
            parts.append(f"{name} {float(value):.4g}")
    return "  ".join(parts).rstrip()
