"""Nearness: says how near the best plan surely is to the best of its space, while a search goes on.

A terminal has one line that changes; elsewhere a line comes now and then. They go to standard
error, so that standard output has only the plan.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console

from meshdsl.lowering.costs.units import show_share

_EVERY = 20.0  # seconds between lines where there is no terminal


@contextmanager
def progress(console: Console | None = None) -> Iterator[Callable[[float, int], None]]:
    """Yields the `on_progress` of an `Effort`: the share above the optimum, and the plans left."""
    console = console or Console(stderr=True)
    if console.is_interactive:
        with console.status("looking for a plan") as status:
            yield lambda share, left: status.update(_line(share, left))
        return
    latest = time.monotonic()

    def in_lines(share: float, left: int) -> None:
        nonlocal latest
        if time.monotonic() >= latest + _EVERY:
            latest = time.monotonic()
            console.print(_line(share, left), markup=False, highlight=False)

    yield in_lines


def _line(share: float, left: int) -> str:
    plans = "plan" if left == 1 else "plans"
    return f"at most {show_share(share)} above the optimum; {left:,} {plans} may be faster"
