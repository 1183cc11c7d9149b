"""Signals that come to a supervisor: it passes them on, and a second one kills."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from meshdsl.training.exit_codes import NOTICE

_CAME: list[int] = []  # an Event has a lock, which the thread that a handler interrupts may hold


def came() -> bool:
    """Whether a signal has come while `handled` is at work, so that waiting is of no use."""
    return bool(_CAME)


@contextmanager
def handled(pass_on: Callable[[int], None], kill: Callable[[], None]) -> Iterator[None]:
    """Handles SIGINT, SIGTERM and notices while its block runs.

        with handled(supervisor.pass_on, supervisor.kill_all):
            ...

    Args:
        pass_on: takes the number of a signal, in a handler.
        kill: called in place of it for a signal that is no notice and comes after another such one.
    """
    numbers = [signal.SIGINT, signal.SIGTERM, *([] if NOTICE is None else [NOTICE])]
    before = {number: signal.getsignal(number) for number in numbers}
    last: int | None = None

    def handle(number: int, frame: Any) -> None:
        nonlocal last
        again = last not in (None, NOTICE) and number != NOTICE
        last = number
        _CAME.append(number)
        if again:
            kill()
        else:
            pass_on(number)

    _CAME.clear()
    for number in numbers:
        signal.signal(number, handle)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        _CAME.clear()
