"""The steps since the last report, and how long the device had no work while they waited for data.

The host learns whether the device has ended its work, but not when: waiting for the end would keep
the host from preparing the next batch. Therefore a wait for data during which the device ended its
work is settled at the next report, where the host waits for the last step and knows its time. This
is an estimate: all steps between two reports are taken to last as long as the shortest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from meshdsl.tensors.named_array import NamedArray


class Pending:
    """The steps since the last report: their time, metrics, and shares of a batch.

    Args:
        clock: what tells the time, in seconds.

    Attributes:
        started: when the first of these steps began.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.started = clock()
        self.metrics: list[dict[str, NamedArray]] = []
        self.shares: list[float] = []
        self._clock = clock
        self._idle = 0.0
        # The device has worked without a pause since `_got_work`, on `_calls` calls.
        self._got_work = self.started
        self._calls = 0
        self._unsettled: list[tuple[float, float, float, int]] = []

    def running(self) -> bool:
        """Whether the device still works on the last of these steps."""
        if not self.metrics:
            return False
        ready = getattr(self.metrics[-1]["loss"].data, "is_ready", None)
        return ready is not None and not ready()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Counts the time of its block in which the device has no work."""
        worked, began = self.running(), self._clock()
        try:
            yield
        finally:
            ended = self._clock()
            if not worked:
                self._idle += ended - began
            elif not self.running():
                self._unsettled.append((began, ended, self._got_work, self._calls))

    def dispatching(self) -> None:
        """Says that the device gets its next call of the step."""
        if not self.running():
            self._got_work, self._calls = self._clock(), 0
        self._calls += 1

    def settle(self) -> float:
        """Returns the seconds of waits without work; to be asked when the last call has ended."""
        if self._unsettled:
            # When the device ended its work is known only as "before": the shortest is nearest.
            call = (self._clock() - self._got_work) / self._calls
            for _, ended, got_work, calls in self._unsettled:
                call = min(call, (ended - got_work) / calls)
            for began, ended, got_work, calls in self._unsettled:
                self._idle += ended - max(began, got_work + calls * call)
        idle, self._idle, self._unsettled = self._idle, 0.0, []
        return idle
