"""One process that a supervisor has started: its output, and how it ended.

Guarantees:
    A process is the leader of a group of its own, with all that it starts. `kill` ends the group.
    The first process of a host writes to the supervisor's output as it goes. Of the others the last
    lines are kept, so that a failure can show them.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import IO

from meshdsl.training.launching.warm import Forked, Warm

_KEPT = 40  # the last lines of a process that a failure shows
# Lines of JAX's collectives on CPUs, and of its coordination, which say that all is well.
_NOISE = re.compile(
    rb"\[Gloo\] Rank |[IW]\d{4} .* \S+\.cc:\d+\] .*Using experimental recoverable task feature"
)
_ENDING = 60.0  # seconds in which the kernel ends a process that SIGKILL was sent to
_DRAINING = 2.0  # seconds in which the last output of a process that has ended is read


@dataclass
class Child:
    """A process of the job.

    Attributes:
        number: its number in the job.
        shown: whether its output is shown as it comes.
        host: what messages call its host.
        code: its exit code, minus the signal that ended it, or None while it runs.
        ended_at: when it ended, by `time.monotonic`.
    """

    number: int
    shown: bool
    host: str = field(default_factory=socket.gethostname)
    began: float = field(default_factory=time.monotonic)
    code: int | None = None
    ended_at: float = 0.0
    _stopped: float = float("inf")  # when SIGKILL was sent first, by `time.monotonic`
    _process: subprocess.Popen[bytes] | Forked | None = None
    _lines: deque[bytes] = field(default_factory=lambda: deque(maxlen=_KEPT))
    _reader: threading.Thread | None = None
    _has_ended: threading.Event = field(default_factory=threading.Event)

    def start(
        self,
        command: Sequence[str],
        ended: Callable[[Child], None],
        environment: Mapping[str, str] | None = None,
        warm: Warm | None = None,
    ) -> None:
        """Starts it. `ended` is called in another thread when it ends.

        Args:
            environment: its variables; None: those of this process.
            warm: the template that it is to come of, if there is one.

        Raises:
            OSError: the machine cannot start another process.
        """
        variables = os.environ if environment is None else environment
        there, here = os.pipe()
        output = 1 if self.shown else here
        try:
            self._process = None if warm is None else warm.started(command, variables, output, here)
            if self._process is None:
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=None if self.shown else here,
                    stderr=here,
                    start_new_session=True,
                    env=variables,
                )
        except BaseException:
            os.close(there)
            raise
        finally:
            os.close(here)
        stream = os.fdopen(there, "rb")
        self._reader = threading.Thread(target=self._read, args=(stream,), daemon=True)
        self._reader.start()
        threading.Thread(target=self._wait, args=(ended,), daemon=True).start()

    def send(self, number: int) -> None:
        """Sends it a signal, if it still runs."""
        if self._process is not None:
            self._process.send_signal(number)

    def stop(self) -> None:
        """Ends it and all that it has started."""
        self._stopped = min(self._stopped, time.monotonic())
        if self._process is not None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def kill(self) -> bool:
        """Ends it and all that it has started, and waits; returns whether it has ended.

        The kernel ends no process that waits for a device or a file system which does not answer.
        """
        self.stop()
        if self._reader is None:  # it was not started
            return True
        if not self._has_ended.wait(max(0.0, self._stopped + _ENDING - time.monotonic())):
            return False
        self._reader.join(_DRAINING)
        return True

    @property
    def unkillable(self) -> str:
        """What to report where `kill` did not end it."""
        assert self._process is not None
        return (
            f"process {self.number} (pid {self._process.pid}) has not ended {_ENDING:g} s after "
            "SIGKILL: the kernel waits for a device or a file system that does not answer. This "
            "host takes no further part: see dmesg, and start it anew"
        )

    def lines(self) -> list[str]:
        """Returns its last lines."""
        if self._reader is not None:
            self._reader.join(_DRAINING)
        return [line.decode(errors="replace") for line in [*self._lines]]

    def end(self) -> str:
        """Says how it ended: `was killed by signal 9 (SIGKILL)`."""
        return how_ended(self.code)

    def _read(self, stream: IO[bytes]) -> None:
        with suppress(OSError, ValueError), stream:
            for line in stream:
                if _NOISE.match(line):
                    continue
                if self.shown:
                    with suppress(OSError):  # nobody reads it any more
                        os.write(2, line)
                if line.strip():
                    self._lines.append(line.rstrip())

    def _wait(self, ended: Callable[[Child], None]) -> None:
        assert self._process is not None
        code, self.ended_at = self._process.wait(), time.monotonic()
        self.code = code  # last: who sees it reads `ended_at`
        self._has_ended.set()
        ended(self)


def how_ended(code: int | None) -> str:
    """Returns an exit code as what has happened to a process; a signal is negative."""
    if code is None:
        return "was still running"
    if code >= 0:
        return f"ended with exit code {code}"
    with suppress(ValueError):
        return f"was killed by signal {-code} ({signal.Signals(-code).name})"
    return f"was killed by signal {-code}"
