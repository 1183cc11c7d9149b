"""Warm starts: a process of the job comes of one that has imported everything already.

The supervisor of a host keeps one template (see `forking`), which is forked for each process of
each start. What they import then takes no time again, and its memory is shared.

Guarantees:
    Where there is no template, or it cannot be used, `started` says so, and a process starts
    without it. Nothing fails because of it.
    Variables that libraries may read when they are imported are those of a start without it, and
    so is the code of meshdsl: after a change of it there is another template.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from meshdsl.training.launching.forking import HEADER, OURS, READY
from meshdsl.training.launching.job_time import START
from meshdsl.training.launching.signals import came

PATIENCE = 120.0  # seconds in which a template has imported everything
_POLL = 0.1  # seconds after which a signal ends the waiting
_ANSWER = 10.0  # seconds in which it is forked
_SET_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER of Linux's prctl
_IN_CHANGE = (OSError, ImportError)  # what a version raises while files are replaced
_ROOM = 512  # bytes of arguments that a process may have beside those of `like`


class Forked:
    """A process that comes of a template; it is used as `subprocess.Popen` is.

    Attributes:
        pid: its number.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._code: int | None = None
        # A signal's handler may send a signal while this thread is sending one.
        self._reaping = threading.RLock()

    def send_signal(self, number: int) -> None:
        """Sends it a signal, if it still runs."""
        with self._reaping:
            if self._code is None:
                with suppress(ProcessLookupError):
                    os.kill(self.pid, number)

    def wait(self) -> int:
        """Waits until it has ended; returns its exit code, or minus the signal that ended it."""
        while self._code is None:
            with suppress(ChildProcessError):  # another thread was faster
                os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
            with self._reaping:
                if self._code is None:
                    try:
                        _, status = os.waitpid(self.pid, 0)
                    except ChildProcessError:  # who ignores SIGCHLD is not told the exit code
                        status = 0
                    self._code = os.waitstatus_to_exitcode(status)
        return self._code


class Warm:
    """The template of a host's processes: `Warm(command, like, environment, code_version)`.

    Args:
        command: starts it; the supervisor's number, a descriptor and room for arguments follow.
        like: the command of a process, but for flags of its own.
        environment: the variables of the processes.
        version: returns the version of the code that it imports.
    """

    def __init__(
        self,
        command: Sequence[str],
        like: Sequence[str],
        environment: Mapping[str, str],
        version: Callable[[], str],
    ) -> None:
        self._command, self._environment, self._version = command, environment, version
        # A process that `ps` shows has its own command in place of the template's.
        self._room = "." * (sum(len(os.fsencode(word)) + 1 for word in like) + _ROOM)
        self._code, self._start = "", ""
        self._process: subprocess.Popen[bytes] | None = None
        self._line: socket.socket | None = None
        self._ready = False
        self._useless = sys.platform != "linux"

    def begin(self) -> None:
        """Starts the template, unless it is there; it imports what it needs in the meantime."""
        if self._useless or self._process is not None:
            return
        try:
            self._code = self._version()
            self._line, other = socket.socketpair()
            with other:
                own = [str(os.getpid()), str(other.fileno())]
                self._process = subprocess.Popen(
                    [*self._command, *own, self._room],
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,
                    env=self._environment,
                    pass_fds=[other.fileno()],
                )
        except _IN_CHANGE:
            self.close()

    def started(
        self, command: Sequence[str], environment: Mapping[str, str], output: int, errors: int
    ) -> Forked | None:
        """Returns a new process of a command, which is to begin; None: start it without a template.

        Args:
            command: `python -c program supervisor words...`; the program is the template's.
            output, errors: descriptors.
        """
        if _read_by_libraries(environment) != _read_by_libraries(self._environment):
            return None
        start = environment.get(START, "")
        if start != self._start and self._is_outdated():
            self.close()
        self._start = start
        for _ in range(2):  # it may have ended since the last start
            self.begin()
            try:
                if self._is_ready():
                    return self._forked(command, environment, output, errors)
            except (OSError, ValueError):
                self.close()  # its answer may still come, which no later start is to read
            if came():  # the process ends as soon as it has begun
                return None
            self.close()
        self._useless = True  # no start is to wait for templates again
        return None

    def keeps_waiting(self) -> bool:
        """Whether a start would wait for the template: it still imports. For any thread."""
        line = self._line
        if self._useless or self._ready or line is None:
            return False
        with suppress(OSError, ValueError):  # it is closed meanwhile
            readable, _, _ = select.select([line], [], [], 0)
            return not readable
        return False

    def _is_outdated(self) -> bool:
        """Whether the code is another one than the template's, or changes at this moment."""
        if self._process is None:
            return False
        try:
            return self._version() != self._code
        except _IN_CHANGE:
            return True

    def close(self) -> None:
        """Ends the template; the processes that have come of it go on."""
        if self._process is not None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        if self._line is not None:
            self._line.close()
        self._process = self._line = None
        self._ready = False

    def _is_ready(self) -> bool:
        """Whether the template can be forked; waits until it has imported everything.

        It does not wait any more when a signal comes to the supervisor.
        """
        if self._line is None:
            return False
        self._line.settimeout(_POLL)
        end = time.monotonic() + PATIENCE
        while not self._ready and not came() and time.monotonic() < end:
            with suppress(TimeoutError):
                if self._line.recv(1) != READY:
                    return False
                self._ready = True
        return self._ready

    def _forked(
        self, command: Sequence[str], environment: Mapping[str, str], output: int, errors: int
    ) -> Forked:
        """Returns a new process of a command.

        Raises:
            OSError, ValueError: the template has ended, or this kernel does not give the process to
                the supervisor. It ends before it begins.
        """
        assert self._line is not None
        self._line.settimeout(_ANSWER)
        own = {name: value for name, value in environment.items() if name.startswith(OURS)}
        text = json.dumps({"command": [*command], "variables": own}).encode()
        prctl = ctypes.CDLL(None, use_errno=True).prctl
        nothing = os.open(os.devnull, os.O_RDONLY)
        waits, begins = os.pipe()
        try:
            prctl(_SET_SUBREAPER, 1, 0, 0, 0)
            streams = [nothing, output, errors, waits]
            socket.send_fds(self._line, [len(text).to_bytes(HEADER, "big")], streams)
            self._line.sendall(text)
            number = int.from_bytes(self._line.recv(HEADER, socket.MSG_WAITALL), "big")
            facts = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()
            if int(facts[1]) != os.getpid():
                raise ValueError("it is no child of this process")
            os.write(begins, b"!")
            return Forked(number)
        finally:
            prctl(_SET_SUBREAPER, 0, 0, 0, 0)
            for descriptor in (waits, begins, nothing):
                os.close(descriptor)


def _read_by_libraries(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if not name.startswith(OURS)}
