"""Interrupting: Ctrl-C ends the search of more plans, and the plans so far are shown."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """Makes the first Ctrl-C stop the work of its block, and the next one the process.

    Yields:
        Whether the work is to stop.
    """
    stopped: list[bool] = []
    before = signal.getsignal(signal.SIGINT)

    def stop(number: int, frame: Any) -> None:
        stopped.append(True)
        signal.signal(signal.SIGINT, before)

    signal.signal(signal.SIGINT, stop)
    try:
        yield lambda: bool(stopped)
    finally:
        signal.signal(signal.SIGINT, before)
