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
                gc.enable()
