"""Why a run ends before its last step: a signal, a time limit, or a chosen step.

Guarantees:
    After the first signal, the run completes the current step and saves the state. A second signal
    ends the process at once, unless it is SIGTERM within a second of another: a scheduler and a
    supervisor may both send it.
    SIGUSR1 is a notice, such as Slurm's: it has the effect of the first signal, and may come
    again. If something else listens to it, it is left alone.
    When a run has ended, nothing of it is left that changes how signals are handled.
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from meshdsl.training.exit_codes import NOTICE, TERMINATED, UNFINISHED
from meshdsl.training.settings import Number, Whole, check, record, setting

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_TWICE = 1.0  # seconds in which the same SIGTERM may come from two senders


class Stopped(SystemExit):
    """A run has ended before its last step, by SIGTERM or a notice; its state is saved.

    Attributes:
        code: 143, as shells count a process ended by SIGTERM; 75 after a notice.
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

    Examples:
        >>> from meshdsl.training import Stops
        >>> stops = Stops(after_minutes=55, grace=30)
        >>> stops.after_minutes, stops.at_step
        (55, None)
    """

    after_minutes: float | None = setting(
        "End after this time, with a checkpoint (start again to go on).", Number(), default=None
    )
    at_step: int | None = setting("End after this step, likewise.", Whole(1), default=None)
    grace: float | None = setting(
        "Seconds from a signal until the process is killed: the run says whether it is saved by "
        "then. Default: nothing is said.",
        Number(),
        default=None,
    )

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
        if self.signal == NOTICE:  # a supervisor sends it too, before it starts more processes
            raise Stopped(f"ended by a notice after step {step} of {steps}", UNFINISHED)
        reason = f"interrupted after step {step} of {steps}"
        if self.signal == signal.SIGTERM:
            raise Stopped(reason)
        raise KeyboardInterrupt(reason)

    @contextmanager
    def listening(self, begin: Callable[[], None] = lambda: None) -> Iterator[None]:
        """Handles signals while its block runs; only in the main thread, which gets them.

        Args:
            begin: what the first signal calls.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before: dict[int, Any] = {one: signal.getsignal(one) for one in _SIGNALS}
        timers: list[threading.Timer] = []

        def stop(number: int, frame: Any) -> None:
            first, self.signal = self.signal is None, self.signal or number
            self._event.set()
            again = b"Ctrl-C again" if number == signal.SIGINT else b"the next signal"
            at_once = b"; " + again + b" stops at once"
            if number == NOTICE:
                if not first:
                    return
                at_once = b""
            else:
                for other in _SIGNALS:
                    signal.signal(other, before[other])
                if number == signal.SIGTERM and before[number] == signal.SIG_DFL:
                    timers.append(_ignored_for_a_while(number))
            begin()
            with suppress(OSError):  # nobody reads it any more
                os.write(2, b"\nstopping after this step" + at_once + b"\n")

        if NOTICE is not None and signal.getsignal(NOTICE) == signal.SIG_DFL:
            before[NOTICE] = signal.SIG_DFL
        for number in before:
            signal.signal(number, stop)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            for timer in timers:  # one that is late would change what the next run has set
                timer.cancel()
                timer.join()


def _ignored_for_a_while(number: int) -> threading.Timer:
    """Ignores a signal for `_TWICE` seconds; then the timer lets it end the process at once.

    The main thread may be in a call that lasts, and Python lets no other thread set a handler. So
    the C library does.
    """
    signal.signal(number, signal.SIG_IGN)
    library = ctypes.CDLL(None)
    timer = threading.Timer(_TWICE, library.signal, (number, int(signal.SIG_DFL)))
    timer.daemon = True
    timer.start()
    return timer
