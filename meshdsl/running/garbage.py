"""Pausing Python's cyclic garbage collector while a program is built.

Tracing and lowering make many objects that stay until they are done. The collector would go through
all of them again and again, and find nothing: with thousands of parameters that takes as long as
the work itself. What counts references frees as ever.
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

    The last one to end leaves the collector as the first one found it.

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
