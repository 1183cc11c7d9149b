"""Another host and its processes, as the supervisor that leads the job sees them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from meshdsl.training.launching.children import how_ended
from meshdsl.training.launching.lines import Line
from meshdsl.training.launching.terms import Devices

_PARTING = 15.0  # seconds in which another host kills a process


@dataclass(eq=False)
class RemoteProcess:
    """A process on another host.

    Attributes:
        start: the number of the start that it is of. Messages about others are ignored.
    """

    number: int
    start: int
    member: RemoteHost
    shown: bool
    began: float = field(default_factory=time.monotonic)
    code: int | None = None
    ended_at: float = 0.0
    ended: Callable[[Any], None] | None = None
    _lines: list[str] = field(default_factory=list)
    _lost: bool = False
    _deadline: float = 0.0
    _has_ended: threading.Event = field(default_factory=threading.Event)

    @property
    def host(self) -> str:
        return self.member.host

    def send(self, number: int) -> None:
        if self.code is None:
            self.member.line.send(signal=number, process=self.number, of=self.start)

    def stop(self) -> None:
        if self.ended is not None and self.code is None:
            self.member.line.send(kill=self.number, of=self.start)
            self._deadline = time.monotonic() + _PARTING

    def kill(self) -> bool:
        if self.ended is not None and self.code is None:
            self._has_ended.wait(max(0.0, self._deadline - time.monotonic()))
        return True  # if it stays, its host takes no further part

    unkillable = ""

    def lines(self) -> list[str]:
        return self._lines

    def end(self) -> str:
        where = f" on {self.host}"
        if self._lost:
            return f"is lost: nothing is heard of its supervisor{where}"
        return how_ended(self.code) + where

    def note_end(self, code: int, lines: Sequence[str], lost: bool = False) -> None:
        """Notes how it ended."""
        if self.code is not None:
            return
        # Of a lost host nothing is known after its last message.
        self.ended_at = max(self.member.line.heard, self.began) if lost else time.monotonic()
        self._lines, self._lost = [*lines], lost
        self.code = code  # last: who sees it reads the others
        self._has_ended.set()
        if self.ended is not None:
            self.ended(self)


@dataclass(eq=False)
class RemoteHost:
    """The supervisor of another host, as it has said.

    Attributes:
        names: names or addresses of its host.
        port: where it listens, to lead if the first supervisor is lost.
        copies: what it says of its copies in memory.
        devices: how many each of its processes has; None: it does not know.
        rehearses: whether it compiles programs ahead.
        ready: whether a process there would begin at once: its template has imported everything.
        leaving: the signal by which its host is to end; 0: none.
        running: its processes in the start at hand, by their numbers.
    """

    line: Line
    numbers: range
    host: str
    own_id: str
    spare: bool
    names: list[str]
    port: int
    copies: list[dict[str, Any]]
    devices: Devices | None
    rehearses: bool
    ready: bool = False
    leaving: int = 0
    running: dict[int, RemoteProcess] = field(default_factory=dict)
