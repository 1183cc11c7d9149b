"""Why a run ends before its last step: a signal, a time limit, or a chosen step.

Guarantees:
    After the first signal, the run completes the current step and saves the state. A second signal
    ends the process at once.
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

from meshdsl.training.exit_codes import TERMINATED
from meshdsl.training.settings import Number, Whole, check, record, setting

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stopped(SystemExit):
    """A run has ended before its last step, by SIGTERM; its state is saved.

    Attributes:
        code: 143, as shells count a process ended by SIGTERM.
        reason: what has happened, as a sentence.
    """

    def __init__(self, reason: str, code: int = TERMINATED) -> None:
        super().__init__(code)
        self.reason = reason


@record
class Stops:
    """What ends a run before its last step, besides signals: `Stops(at_step=1000)`.

    Raises:
        ValueError: values are of another kind, or numbers are too small.
    """

    after_minutes: float | None = setting(
        "End after this time, with a checkpoint (start again to go on).", Number(), default=None
    )
    at_step: int | None = setting("End after this step, likewise.", Whole(1), default=None)

    def __post_init__(self) -> None:
        check(self)


@dataclass
class Stopping:
    """Decides whether a run ends between two steps. Minutes count from when this is made.

    Attributes:
        stops: what ends the run besides signals.
        signal: the signal that this process or another of the job got, if any.
    """

    stops: Stops
    signal: int | None = None
    _event: threading.Event = field(default_factory=threading.Event)
    _started: float = field(default_factory=time.monotonic)

    def due(self, step: int) -> bool:
        """Whether the run ends after a step."""
        if self._event.is_set() or self.reached(step):
            return True
        after, minutes = self.stops.after_minutes, (time.monotonic() - self._started) / 60
        return after is not None and minutes >= after

    def reached(self, step: int) -> bool:
        """Whether a step is the chosen last one, or comes after it."""
        return self.stops.at_step is not None and step >= self.stops.at_step

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
        """Handles signals while its block runs; only in the main thread, which gets them."""
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
