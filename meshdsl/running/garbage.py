"""Pausing Python's cyclic garbage collector while a program is built.

Tracing and lowering make many objects that they need to the end. The collector would go through all
of them again and again, and free nothing: with thousands of parameters that takes as long as the
work itself. Reference counting still frees objects meanwhile.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

# As many new objects take the collector about 0.02 s.
_MANY = 100_000

_lock = threading.Lock()
_pauses = 0
_was_on = False


@contextmanager
def paused() -> Iterator[None]:
    """Pauses the collector; pauses may nest, in several threads.

    The last pause restores the state that the collector had before the first one.

        with paused():
            build()
    """
    global _pauses, _was_on
    with _lock:
        if _pauses == 0:
            _was_on = gc.isenabled()
            gc.disable()
        _pauses += 1
    try:
        yield
    finally:
        with _lock:
            _pauses -= 1
            if _pauses == 0 and _was_on:
                _age()
                gc.enable()


def _age() -> None:
    """Moves the objects that a long pause made to the oldest generation, without a walk.

    Else the collector goes through all of them as soon as it is enabled, and again when they are
    middle-aged. Unfreezing would also thaw what somebody else has frozen, so then nothing is moved.
    """
    if gc.get_count()[0] >= _MANY and gc.get_freeze_count() == 0:
        gc.freeze()
        gc.unfreeze()
