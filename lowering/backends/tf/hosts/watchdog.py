"""A time-out for collectives between hosts, and one call of them at a time.

TensorFlow's own, an attribute of each collective, holds a thread until the time is over, for every
one that runs: thousands, soon. Here one thread looks after a whole process. When a device has been
in a collective for as long as is allowed, and no other has begun or ended one meanwhile, it lets
one fail that no other device takes part in, and by that TensorFlow ends all of them.

Guarantees:
    Time that devices compute, in no collective, does not count.
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

_PAUSE = 30.0  # in seconds, the longest between two looks
_TURN = threading.Lock()


@dataclass(eq=False)
class Call:
    """A call of a program.

    Attributes:
        tokens: those of the devices.
        timeout: in seconds, for which these may stay as they are, with a device in a collective.
        ended: whether they have been for longer, and so the call was ended.
    """

    tokens: Sequence[tf.Variable]
    timeout: float
    ended: bool = False
    seen: list[int] | None = None
    since: float = field(default_factory=time.monotonic)

    def is_stuck(self) -> bool:
        """Looks at the tokens; whether they have been as they are for too long."""
        found = read(self.tokens)
        if found != self.seen or all(instruction(held) is None for held in found):
            self.seen, self.since = found, time.monotonic()
        return time.monotonic() - self.since > self.timeout


class _Watchdog:
    """Looks after the call at hand, from a thread of its own."""

    def __init__(self) -> None:
        self._call: Call | None = None
        self._changed = threading.Condition()
        threading.Thread(target=self._run, name="meshdsl-watchdog", daemon=True).start()

    def look_after(self, call: Call | None) -> None:
        """Looks after this call, and no longer after the one before."""
        with self._changed:
            self._call = call
            self._changed.notify()

    def _run(self) -> None:
        while True:
            call = self._after_a_pause()
            if call is not None and call.is_stuck():
                self._abort(call)

    def _after_a_pause(self) -> Call | None:
        """Waits for a call, and then for a while; returns it if it is still the one at hand."""
        with self._changed:
            self._changed.wait_for(lambda: self._call is not None)
            call = self._call
            assert call is not None
            pause = min(call.timeout / 10, _PAUSE)
            return None if self._changed.wait_for(lambda: self._call is not call, pause) else call

    def _abort(self, call: Call) -> None:
        with self._changed:  # so that no other call begins meanwhile
            if self._call is call:
                self._call, call.ended = None, True
                _fail()


@functools.cache
def _watchdog() -> _Watchdog:
    return _Watchdog()


@contextlib.contextmanager
def watched(tokens: Sequence[tf.Variable], timeout: float) -> Iterator[Call]:
    """Ends collectives that a call in its block has waited in for too long; one block at a time.

    Args:
        tokens: those of this process's devices.
        timeout: in seconds; infinity for none.
    """
    call = Call(tokens, timeout)
    with _TURN:
        if math.isinf(timeout):
            yield call
            return
        watchdog = _watchdog()
        watchdog.look_after(call)
        try:
            yield call
        finally:
            watchdog.look_after(None)


def _fail() -> None:
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
