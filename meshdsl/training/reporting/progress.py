"""Progress of a command: a bar on a terminal, now and then a line elsewhere.

It goes to standard error, so that standard output has only the results.
"""

from __future__ import annotations

import time
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from meshdsl.training.reporting.output import tell

_LINES = 10  # where there is no terminal


class Progress:
    """Counts what a command does one by one, such as the candidates of a sweep.

    Args:
        what: what is counted.
        console: where a bar is drawn, if it is a terminal.
        patience: seconds without a line, where there is no terminal.
    """

    def __init__(
        self, total: int, what: str, console: Console | None = None, patience: float = 0.0
    ) -> None:
        self._first_line = time.monotonic() + patience
        self._console = console or Console(stderr=True)
        self._total, self._what = total, what
        self._count = self._failed = 0
        self._bar: Bar | None = None
        if self._console.is_interactive and total:
            self._bar = Bar(
                TextColumn(what),
                MofNCompleteColumn(),
                BarColumn(bar_width=None),
                TimeRemainingColumn(compact=True),
                TextColumn("{task.fields[failed]}"),
                console=self._console,
                expand=True,
                transient=True,
            )
            self._task = self._bar.add_task("", total=total, failed="")

    def step(self, count: int = 1, failed: bool = False) -> None:
        """Counts some more.

        Args:
            failed: whether their candidate could not be measured.
        """
        before, self._count = self._count, self._count + count
        self._failed += failed
        failures = f"{self._failed:,} could not be measured" if self._failed else ""
        if self._bar is not None:
            self._bar.update(self._task, completed=self._count, failed=failures)
            return
        every = max(1, self._total // _LINES)
        done = self._count == self._total
        if time.monotonic() < self._first_line:
            return
        if count and (done or self._count // every > before // every):
            line = f"{self._count:,} of {self._total:,} {self._what}"
            text = f"{line}; {failures}" if failures else line
            tell(text, error=True)

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.stop()
