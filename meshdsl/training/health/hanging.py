"""Steps that hang: a thread notices that a run gets nowhere, says where it is, and ends it.

A collective waits for ever if one of its processes stands still, and so does a loop of the user's
data. No error is raised in either case.

Guarantees:
    Time in which this process itself stood still, as on a machine that was suspended, is not
    counted.
    Without a timeout there is no thread.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Self

from meshdsl.training.exit_codes import FAILED

_LOOKS = 4  # how often the thread looks within the timeout
_GRACE = 1.0  # seconds for the other processes of the job, to say where they are


def _end(text: str) -> None:
    """Writes where all threads of this process are, and ends it."""
    with suppress(OSError):
        os.write(2, f"meshdsl train: {text}\n".encode())
        faulthandler.dump_traceback(sys.__stderr__ or 2)
        os.write(2, f"meshdsl train: {text.partition(': ')[0]}\n".encode())
    time.sleep(_GRACE)
    os._exit(FAILED)


@dataclass
class HangWatch:
    """Watches a run in its with-block: `at` says what the run does, each time it does another.

    Args:
        timeout: seconds that one thing may take; None: for ever.
        process: the number of this process.
        end: ends this process with a reason.
    """

    timeout: float | None
    process: int = 0
    end: Callable[[str], None] = _end
    _doing: str | None = None
    _since: float = field(default_factory=time.monotonic)
    _over: threading.Event = field(default_factory=threading.Event)

    def at(self, doing: str | None) -> None:
        """Says what the run does from now on; None: something that may take as long as it likes."""
        self._since, self._doing = time.monotonic(), doing

    def __enter__(self) -> Self:
        if self.timeout is not None:
            threading.Thread(target=self._watch, args=(self.timeout,), daemon=True).start()
        return self

    def __exit__(self, *error: Any) -> None:
        self._over.set()

    def _watch(self, timeout: float) -> None:
        every = timeout / _LOOKS
        looked = time.monotonic()
        while not self._over.wait(every):
            now = time.monotonic()
            stood_still, looked = now - looked > 2 * every + 1.0, now
            if stood_still:
                self._since = now
            doing, since = self._doing, self._since
            if doing is not None and now - since > timeout:
                self.end(
                    f"process {self.process}, {doing}, has got nowhere for {timeout:g} s "
                    "(--step_timeout): it is here, and so may be others. Start all of them again: "
                    "with a --workdir they go on from the last checkpoint"
                )
                return
