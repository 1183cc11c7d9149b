"""A time-out for collectives between hosts, and a lock: one call runs at a time.

TensorFlow's own time-out is an attribute of each collective. It blocks a thread for that time for
every collective that runs, soon thousands. Here one thread watches a process. If a device has been
in a collective for the allowed time, and no device has begun or ended one meanwhile, the thread
runs a collective that fails because no other device takes part. TensorFlow then aborts all others.

Guarantees:
    Time in which devices compute, and are in no collective, does not count.
    Calls of several threads take turns: TensorFlow would mix their collectives.
"""

from __future__ import annotations

import contextlib
import functools
import math
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import tensorflow as tf

from meshdsl.lowering.backends.tf.hosts.keys import NOBODY
from meshdsl.lowering.backends.tf.hosts.tokens import instruction, read

_PAUSE = 30.0  # seconds, the longest between two checks
_ONE_CALL = threading.Lock()


@dataclass(eq=False)
class Call:
    """A call of a program.

    Attributes:
        tokens: those of the devices.
        timeout: how long they may be unchanged, in seconds, while a device is in a collective.
        timed_out: whether they were unchanged for longer, so that the call was aborted.
        seen: the values of the tokens at the last check.
        since: when they were first seen with these values, or in no collective.
    """

    tokens: Sequence[tf.Variable]
    timeout: float
    timed_out: bool = False
    seen: list[int] | None = None
    since: float = field(default_factory=time.monotonic)

    def is_stuck(self) -> bool:
        """Reads the tokens, and returns whether they have been unchanged for too long."""
        values = read(self.tokens)
        if values != self.seen or all(instruction(value) is None for value in values):
            self.seen, self.since = values, time.monotonic()
        return time.monotonic() - self.since > self.timeout


class _Watchdog:
    """Watches the current call, from a thread of its own."""

    def __init__(self) -> None:
        self._call: Call | None = None
        self._changed = threading.Condition()
        threading.Thread(target=self._run, name="meshdsl-watchdog", daemon=True).start()

    def watch(self, call: Call | None) -> None:
        """Watches this call, instead of the one before; None: no call."""
        with self._changed:
            self._call = call
            self._changed.notify()

    def _run(self) -> None:
        while True:
            call = self._call_after_pause()
            if call is not None and call.is_stuck():
                self._abort(call)

    def _call_after_pause(self) -> Call | None:
        """Waits for a call and then pauses; returns the call if it is still the current one."""
        with self._changed:
            self._changed.wait_for(lambda: self._call is not None)
            call = self._call
            assert call is not None
            pause = min(call.timeout / 10, _PAUSE)
            return None if self._changed.wait_for(lambda: self._call is not call, pause) else call

    def _abort(self, call: Call) -> None:
        with self._changed:  # so that no other call begins meanwhile
            if self._call is call:
                self._call, call.timed_out = None, True
                _fail()


@functools.cache
def _watchdog() -> _Watchdog:
    return _Watchdog()


@contextlib.contextmanager
def watched(tokens: Sequence[tf.Variable], timeout: float) -> Iterator[Call]:
    """Aborts a call in its block that waits in a collective for too long; one block at a time.

    Args:
        tokens: those of this process's devices.
        timeout: in seconds; infinity: none.
    """
    call = Call(tokens, timeout)
    with _ONE_CALL:
        if math.isinf(timeout):
            yield call
            return
        watchdog = _watchdog()
        watchdog.watch(call)
        try:
            yield call
        finally:
            watchdog.watch(None)


def _fail() -> None:
    """Runs a collective that fails, so that TensorFlow aborts all others."""
    with contextlib.suppress(tf.errors.OpError):
        tf.raw_ops.CollectiveReduceV2(
            input=0.0,
            group_size=2,
            group_key=NOBODY,
            instance_key=1,
            ordering_token=[],
            merge_op="Add",
            final_op="Id",
            timeout_seconds=0.1,
        )
