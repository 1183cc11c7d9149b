"""Doing: what goes on before the first step, on a terminal, with the seconds since it began.

Guarantees:
    Nothing is left on the terminal when it is over. Files, pipes and notebooks get nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn


@contextmanager
def doing(what: str, quiet: bool = False, console: Console | None = None) -> Iterator[None]:
    """Shows what the block does, as long as it runs: `with doing("compiling the step"):`.

    Args:
        quiet: whether to show nothing.
        console: where to show it. None: standard output.
    """
    console = console or Console()
    if quiet or not console.is_interactive or console.is_jupyter:
        yield
        return
    columns = SpinnerColumn(), TextColumn(what, markup=False), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True, refresh_per_second=4) as shown:
        shown.add_task("", total=None)
        yield
