"""Why a run ends before its last step: a signal, its time, or a step that was set.

Guarantees:
    The first signal lets the step at hand end, and what is to be saved be saved; a second one ends
    the process at once.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

UNFINISHED = 75  # the exit code of a run that is to be started again (EX_TEMPFAIL of sysexits.h)
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stopped(SystemExit):
    """A run has ended before its last step, by SIGTERM; what it had is saved.

    Attributes:
        code: 143, as shells count a process ended by SIGTERM.
        reason: what has happened, as a sentence.
    """

    def __init__(self, reason: str, code: int = 128 + signal.SIGTERM) -> None:
        super().__init__(code)
        self.reason = reason


@dataclass
class Stops:
    """What may end a run between two steps.

    Attributes:
        after_minutes: for how long it may run, counted from here.
        at_step: after which step it ends.
        signal: the one that has come, if any, to this process or to another of the job.
    """

    after_minutes: float | None = None
    at_step: int | None = None
    signal: int | None = None
    _event: threading.Event = field(default_factory=threading.Event)
    _started: float = field(default_factory=time.monotonic)

    def due(self, step: int) -> bool:
        """Whether the run ends after a step."""
        if self._event.is_set():
            return True
        if self.at_step is not None and step >= self.at_step:
            return True
        minutes = (time.monotonic() - self._started) / 60
        return self.after_minutes is not None and minutes >= self.after_minutes

    @property
    def signalled(self) -> bool:
        return self._event.is_set()

    def check(self, step: int, steps: int) -> None:
        """Raises what a signal asks for: KeyboardInterrupt or `Stopped`."""
        if self.signal is None:
            return
        reason = f"interrupted after step {step} of {steps}"
        if self.signal == signal.SIGTERM:
            raise Stopped(reason)
        raise KeyboardInterrupt(reason)

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Takes signals while its block runs; only in the main thread, whose they are."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.getsignal(number) for number in _SIGNALS}

        def stop(number: int, frame: Any) -> None:
            self.signal = number
            self._event.set()
            for other, handler in before.items():
                signal.signal(other, handler)
            again = b"Ctrl-C again" if number == signal.SIGINT else b"the next signal"
            with suppress(OSError):  # nobody reads it any more
                os.write(2, b"\nstopping after this step; " + again + b" stops at once\n")

        for number in _SIGNALS:
            signal.signal(number, stop)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
