"""Each process of a job watches others: whether they run, stand still, or have ended.

Each listens on a port of its own. A host refuses connections to a process that has ended. One that
stands still, such as a stopped process or a machine that migrates, does not answer.

Guarantees:
    When a process has ended, the others end, whatever they wait for, and name it: up to 64 of them
    within a minute, where its host still answers.
    One that ends because another has ended says so to the rest: all name the one that ended first.
    The others wait up to `pause` seconds for a process that stands still, and name it meanwhile.
"""

from __future__ import annotations

import contextlib
import enum
import json
import math
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

_SECONDS = 2.0  # in which a process that is there answers
_AT_ONCE = 64  # processes that are asked at a time
_EVERY = 4.0  # seconds between two looks at the others
_MISSES = 3  # looks in a row in which one that has ended is not there
_GRACE = 8.0  # seconds in which processes may end by themselves, with reasons of their own
_REPORT_AFTER = 10.0  # seconds without an answer before it is reported
_HEARING = 0.5  # seconds in which one that has something to say says it
_LONGEST = 2**12  # bytes of what it says
AGAIN = "Start all of them again: with a --workdir they go on from the last checkpoint"


class Look(enum.Enum):
    """The state of a process, as another one sees it."""

    ANSWERS = enum.auto()
    ENDED = enum.auto()  # its host is there, and refuses
    SILENT = enum.auto()


@dataclass(frozen=True)
class JobProcesses:
    """The processes of a job.

    Attributes:
        own: the number of this process.
        hosts: the names or addresses of each process's host.
        ports: the port that each process listens on.
        listening: this process's socket, which is open as long as the process lives.
        watched: the processes that this one watches, since they answer it.
        reasons: why processes have ended, in their own words, where others' end is the cause.
        failures: why processes are about to end by themselves, in their own words.
    """

    own: int
    hosts: tuple[tuple[str, ...], ...]
    ports: tuple[int, ...]
    listening: socket.socket
    watched: tuple[int, ...] = ()
    reasons: dict[int, str] = field(default_factory=dict)
    failures: dict[int, str] = field(default_factory=dict)

    def why(self, gone: Sequence[int], stood_still: float = 0.0, what: str = "has ended") -> str:
        """Returns why this process ends if some are gone; arguments are those of `report_ended`.

        One of them may have ended because of another, and have said so; its reason is ours, too.
        """
        said = next(iter(self.reasons.values()), None)
        return said or report_ended(self.names(gone), stood_still, what)

    @property
    def failure(self) -> str | None:
        """Why another process of the job is about to end by itself, if one has said so."""
        # Anybody may connect, also before the number of processes is known.
        known = (text for n, text in [*self.failures.items()] if 0 <= n < len(self.ports))
        return next(known, None)

    def names(self, numbers: Sequence[int]) -> list[str]:
        return [f"process {n} on {self.hosts[n][-1]}" for n in numbers]

    def showing(self, what: Look, numbers: Sequence[int]) -> list[int]:
        """Returns those of some processes that are in a given state."""
        return [number for number, look in self.looks(numbers).items() if look is what]

    def absent(self, numbers: Sequence[int]) -> list[int]:
        """Returns those of some processes that do not answer."""
        return [n for n, look in self.looks(numbers).items() if look is not Look.ANSWERS]

    def looks(self, numbers: Sequence[int]) -> dict[int, Look]:
        """Returns the states of some processes."""
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            return dict(zip(numbers, pool.map(self._look, numbers), strict=True))

    def _look(self, number: int) -> Look:
        looks = set()
        for host in self.hosts[number]:
            look = _look((host, self.ports[number]))
            if look is Look.ANSWERS:
                return look
            looks.add(look)
        # Names that cannot be looked up say nothing of the process: only a host that refuses does.
        return Look.ENDED if Look.ENDED in looks and Look.SILENT not in looks else Look.SILENT

    def neighbours(self) -> list[int]:
        """Returns the processes to watch: of many, those 1, 2, 4, 8 ... numbers on."""
        count = len(self.ports)
        return sorted({(self.own + step) % count for step in self._steps()} - {self.own})

    def answer(self) -> None:
        """Accepts connections, by which others see that this process runs, until it is closed."""
        with contextlib.suppress(OSError):
            while True:
                with self.listening.accept()[0] as connection:
                    self._hear(connection)

    def _hear(self, connection: socket.socket) -> None:
        """Notes why another process ends, if it says so; most connections only look."""
        connection.settimeout(_HEARING)
        text = b""
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            while len(text) < _LONGEST and (data := connection.recv(_LONGEST)):
                text += data
            said = json.loads(text) if text else {}
            number, reason = said["process"], said["reason"]
            other = type(number) is int and number != self.own
            if other and isinstance(reason, str) and reason.isprintable():
                self.reasons[number] = reason
                if said.get("alone"):
                    self.failures[number] = reason

    def say(self, reason: str, alone: bool = False) -> None:
        """Tells those that watch this process that it ends, and why, before it does.

        Args:
            alone: whether it ends by itself, and not since others have ended.
        """
        words = {"process": self.own, "reason": " ".join(reason.split()), "alone": alone}
        text = json.dumps(words).encode()
        count = len(self.ports)
        watching = {(self.own - step) % count for step in self._steps()} - {self.own}
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            for number in watching:
                for host in self.hosts[number]:
                    pool.submit(_say, (host, self.ports[number]), text)

    def _steps(self) -> Sequence[int]:
        count = len(self.ports)
        return range(1, count) if count <= _AT_ONCE else [2**n for n in range(count.bit_length())]

    def close(self) -> None:
        """Answers no more."""
        with contextlib.suppress(OSError):
            self.listening.shutdown(socket.SHUT_RDWR)  # wakes the thread that answers
        self.listening.close()


def _look(address: tuple[str, int]) -> Look | None:
    """Returns what a look at an address shows; None if its name cannot be looked up here."""
    try:
        with socket.create_connection(address, _SECONDS) as connection:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_WR)  # this process has nothing to say
            connection.recv(1)  # the other end closes it: a process that stands still does not
    except (ConnectionRefusedError, ConnectionResetError):
        return Look.ENDED
    except socket.gaierror:
        return None
    except OSError:
        return Look.SILENT
    return Look.ANSWERS


def _say(address: tuple[str, int], text: bytes) -> None:
    """Sends a text to a process, and waits until it has read it."""
    with (
        contextlib.suppress(OSError),
        socket.create_connection(address, _SECONDS) as connection,
    ):
        connection.sendall(text)
        connection.shutdown(socket.SHUT_WR)
        connection.recv(1)


@dataclass
class Watch:
    """Watches the other processes in a thread of its own.

    Attributes:
        job: the processes.
        pause: seconds for which one may stand still.
        over: set when this process has left the job; the thread then ends.
        end: ends this process with a reason.
    """

    job: JobProcesses
    pause: float
    over: threading.Event
    end: Callable[[str], None]
    _silent: dict[int, float] = field(default_factory=dict)  # since when
    _stood_still: float = 0.0  # seconds, until all others are there again
    _due: float = math.inf  # when the thread next goes on
    _reported: set[int] = field(default_factory=set)

    def start(self) -> None:
        threading.Thread(target=self.run, daemon=True).start()

    def run(self) -> None:
        """Watches until this process leaves the job, or must end because others have ended."""
        misses = 0
        while not self._waits(_EVERY):
            looks = self.job.looks(self.job.watched)
            ended = [n for n, look in looks.items() if look is Look.ENDED]
            misses = misses + 1 if ended else 0
            if not ended:
                self._stood_still = 0.0  # the others are there after it
            elif self._stood_still > self.pause:
                misses = _MISSES
            if misses >= _MISSES and not self._waits(_GRACE):
                self._leave(self.why(self.job.showing(Look.ENDED, self.job.watched) or ended))
                return
            if too_long := self._note([n for n, look in looks.items() if look is Look.SILENT]):
                self._leave(too_long)
                return

    def _waits(self, seconds: float) -> bool:
        """Waits, and notes if this process stands still; returns whether it has left the job."""
        began = time.monotonic()
        self._due = began + seconds
        left = self.over.wait(seconds)
        if (waited := time.monotonic() - began) > seconds + _REPORT_AFTER:
            self._stood_still = waited
            self._silent.clear()
        return left

    def why(self, gone: Sequence[int], what: str = "has ended") -> str:
        """Returns why this process ends if some are gone; `what` has happened to them."""
        stood_still = self._stood_still
        if (late := time.monotonic() - self._due) > self.pause:  # the watch itself only wakes up
            stood_still = max(stood_still, late)
        if stood_still <= self.pause:
            return self.job.why(gone, stood_still, what)
        return (
            f"this process stood still for {stood_still:.0f} s (it was stopped, or its machine "
            f"was), and the others wait for {self.pause:g} s (--pause_timeout): "
            f"{', '.join(self.job.names(gone))} of the job {what}. {AGAIN}; --pause_timeout waits "
            "longer"
        )

    def _leave(self, reason: str) -> None:
        if not self.over.is_set():
            self.job.say(reason)
            self.end(reason)

    def _note(self, silent: Sequence[int]) -> str | None:
        """Reports which processes stand still; returns why this one ends, if it lasts too long."""
        now = time.monotonic()
        self._silent = {n: self._silent.get(n, now) for n in silent}
        for n in sorted(self._reported - {*silent}):
            report(f"{self.job.names([n])[0]} answers again")
        self._reported &= {*silent}
        late = [n for n, since in self._silent.items() if now - since > _REPORT_AFTER]
        if fresh := [n for n in late if n not in self._reported]:
            report(
                f"{', '.join(self.job.names(fresh))} does not answer; it is waited for up to "
                f"{self.pause:g} s (--pause_timeout)"
            )
            self._reported |= {*fresh}
        over = [n for n, since in self._silent.items() if now - since > self.pause]
        if not over:
            return None
        return (
            f"{', '.join(self.job.names(over))} of the job has not answered for {self.pause:g} s, "
            "and the others cannot go on: it stands still, or its host cannot be reached. "
            f"{AGAIN}; --pause_timeout waits longer"
        )


def report_ended(ended: Sequence[str], stood_still: float = 0.0, what: str = "has ended") -> str:
    """Returns what to report when other processes have ended.

    Args:
        ended: their names.
        stood_still: seconds for which this process stood still before.
        what: a description of what has happened to them.
    """
    why = f" This process itself stood still for {stood_still:.0f} s." if stood_still else ""
    return f"{', '.join(ended)} of the job {what}, and the others cannot go on.{why} {AGAIN}"


def report(text: str) -> None:
    """Writes a line to standard error, also while other threads have the lock of Python's print."""
    with contextlib.suppress(OSError):  # nobody reads it any more
        os.write(2, f"meshdsl train: {text}\n".encode())
