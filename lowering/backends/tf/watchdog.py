"""A time-out for collectives between hosts.

TensorFlow's own, an attribute of each collective, holds a thread until the time is over, for every
one that runs: thousands, soon. Here one thread looks after a whole process. When devices have come
to no other collective for as long as is allowed, it lets one fail that no other device takes part
in, and by that TensorFlow ends all of them.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import tensorflow as tf

_NOBODY = 2**31 - 1  # the key of a group that no collective of a program has


@dataclass
class _Call:
    """A call of a program.

    Attributes:
        tokens: what holds the number of the instruction that each device has come to.
        timeout: in seconds, for which these may stay as they are.
    """

    tokens: Sequence[tf.Variable]
    timeout: float
    seen: list[int] | None = None
    since: float = field(default_factory=time.monotonic)

    def is_stuck(self) -> bool:
        """Looks at the tokens; whether they have been as they are for too long."""
        found = [int(token.numpy()) for token in self.tokens]
        if found != self.seen:
            self.seen, self.since = found, time.monotonic()
        return time.monotonic() - self.since > self.timeout


class _Watchdog:
    """Looks after the call at hand, from a thread of its own."""

    def __init__(self) -> None:
        self._call: _Call | None = None
        self._begun = threading.Event()
        threading.Thread(target=self._run, name="meshdsl-watchdog", daemon=True).start()

    def begin(self, call: _Call) -> None:
        self._call = call
        self._begun.set()

    def end(self) -> None:
        self._begun.clear()
        self._call = None

    def _run(self) -> None:
        while self._begun.wait():
            call = self._call
            if call is None:
                continue
            time.sleep(call.timeout / 10)
            if call is self._call and call.is_stuck() and call is self._call:
                _abort()
                self.end()


@functools.cache
def _watchdog() -> _Watchdog:
    return _Watchdog()


@contextlib.contextmanager
def watched(tokens: Sequence[tf.Variable], timeout: float) -> Iterator[None]:
    """Ends collectives that the calls in its block have waited in for too long.

    Args:
        tokens: one for each of this process's devices, as `HostLinks.begin` writes them.
        timeout: in seconds.
    """
    watchdog = _watchdog()
    watchdog.begin(_Call(tokens, timeout))
    try:
        yield
    finally:
        watchdog.end()


def _abort() -> None:
    with contextlib.suppress(tf.errors.OpError):
        tf.raw_ops.CollectiveReduceV2(
            input=0.0,
            group_size=2,
            group_key=_NOBODY,
            instance_key=1,
            ordering_token=[],
            merge_op="Add",
            final_op="Id",
            timeout_seconds=0.1,
        )
