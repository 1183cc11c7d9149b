"""A job on several hosts: the first supervisor decides, and those of other hosts do what it says.

All start together and are stopped together, so that nobody waits for a collective with a process
that is gone. A supervisor that comes says which processes it has; see `member` for its side.

Guarantees:
    When a process fails, or a host is gone, all hosts know it at once.
    Nothing is started before the hosts of all processes are there.
    Other code, other numbers and a workdir that is not shared are refused, with the reason, before
    anything is started.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meshdsl.training.exit_codes import FAILED
from meshdsl.training.launching.children import Child, how_ended
from meshdsl.training.launching.crew import Command, Job, Missing, meeting_flags
from meshdsl.training.launching.lines import Line
from meshdsl.training.processes.meeting import address_of, listed, listening

TOKEN = "launch.id"  # the file by which supervisors see that they share the workdir
_REPORT_AFTER = 5.0  # seconds of waiting before the first report
_REPORT_EVERY = 30.0  # seconds between reports
_POLL = 0.2  # seconds between two looks at who has come
_PARTING = 15.0  # seconds in which another host kills a process


@dataclass(frozen=True)
class Terms:
    """What the supervisors of a job must agree on.

    Attributes:
        coordinator: `host:port` of the first supervisor. The processes meet at the port after it.
        total: how many processes the job has.
        code: the version of this package's code.
        silence: seconds without a word after which a host is gone.
    """

    coordinator: str
    total: int
    code: str
    silence: float

    @property
    def meeting(self) -> str:
        """Where the processes meet."""
        host, port = address_of(self.coordinator)
        return f"{self.coordinator.rpartition(':')[0] or host}:{port + 1}"


@dataclass(eq=False)
class RemoteProcess:
    """A process on another host."""

    number: int
    member: _Member
    shown: bool = False
    began: float = field(default_factory=time.monotonic)
    code: int | None = None
    ended: Callable[[Any], None] | None = None
    _lines: list[str] = field(default_factory=list)
    _lost: bool = False
    _over: threading.Event = field(default_factory=threading.Event)

    def send(self, number: int) -> None:
        if self.code is None:
            self.member.line.send(signal=number, process=self.number)

    def kill(self) -> None:
        if self.ended is not None and self.code is None:
            self.member.line.send(kill=self.number)
            self._over.wait(_PARTING)

    def lines(self) -> list[str]:
        return self._lines

    def end(self) -> str:
        where = f" on {self.member.host}"
        if self._lost:
            return f"is lost: nothing is heard of its supervisor{where}"
        return how_ended(self.code) + where

    def over(self, code: int, lines: Sequence[str], lost: bool = False) -> None:
        """Notes how it ended."""
        if self.code is not None:
            return
        self.code, self._lines, self._lost = code, [*lines], lost
        self._over.set()
        if self.ended is not None:
            self.ended(self)


@dataclass(eq=False)
class _Member:
    """The supervisor of another host, as it has said."""

    line: Line
    numbers: range
    host: str
    own_id: str
    running: dict[int, RemoteProcess] = field(default_factory=dict)


class Hosts:
    """The crew of a job on several hosts, in the first supervisor.

    Args:
        numbers: the numbers of the processes on this host.
        command: returns the command line of a process of this host, given its own flags.
        environment: the variables of the processes of this host.
        patience: seconds for which it waits for hosts, before the first start and between two.
        report: takes the lines that say who is missing.

    Raises:
        ValueError: it cannot listen at its port, or cannot write to the workdir.
    """

    def __init__(
        self,
        terms: Terms,
        numbers: range,
        command: Command,
        environment: Mapping[str, str],
        workdir: Path,
        patience: tuple[float, float],
        report: Callable[[str], None],
    ) -> None:
        self._terms = terms
        self._numbers = numbers
        self._command = command
        self._environment = environment
        self._patience = patience
        self._report = report
        self._starts = 0
        self._job: Job | None = None
        self._members: list[_Member] = []
        self._changed = threading.Condition()
        self._token = os.urandom(8).hex()
        try:
            workdir.mkdir(parents=True, exist_ok=True)
            (workdir / TOKEN).write_text(self._token)
        except OSError as error:
            raise ValueError(f"cannot write to workdir {workdir}: {error.strerror}") from error
        self._listener = listening(address_of(terms.coordinator)[1], "supervisor of process 0")
        threading.Thread(target=self._accept, daemon=True).start()

    def assemble(self, job: Job) -> list[Child | RemoteProcess]:
        self._job, self._starts = job, self._starts + 1
        began = time.monotonic()
        patience = self._patience[self._starts > 1]
        report_at = began + _REPORT_AFTER
        with self._changed:
            while not job.ending and (missing := self._missing()):
                now = time.monotonic()
                if now > began + patience:
                    raise Missing(
                        f"{listed(missing)}: no supervisor came for them within {patience:g} s to "
                        f"{self._terms.coordinator}. Start `meshdsl launch --first_process="
                        f"{missing[0]}` on their host, or see why it ended"
                    )
                if now >= report_at:
                    self._report(f"waiting for the hosts of {listed(missing)}")
                    report_at = now + _REPORT_EVERY
                self._changed.wait(_POLL)
            processes: list[Child | RemoteProcess] = []
            processes += [Child(number, number == self._numbers[0]) for number in self._numbers]
            for member in self._members:
                member.running = {n: RemoteProcess(n, member) for n in member.numbers}
                processes += member.running.values()
        return sorted(processes, key=lambda process: process.number)

    def begin(
        self,
        process: Child | RemoteProcess,
        variables: Mapping[str, str],
        ended: Callable[[Any], None],
    ) -> None:
        flags = meeting_flags(process.number, self._terms.total, self._terms.meeting)
        if isinstance(process, Child):
            process.start(self._command(flags), ended, {**self._environment, **variables})
            return
        with self._changed:
            process.ended, process.began = ended, time.monotonic()
            gone = process.member not in self._members
        process.member.line.send(start=process.number, flags=flags, variables=dict(variables))
        if gone:  # it left after the others were counted
            process.over(FAILED, [], lost=True)

    def close(self, code: int) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for member in [*self._members]:
            member.line.send(over=code)
            member.line.close()

    def _missing(self) -> list[int]:
        there = {*self._numbers, *(n for member in self._members for n in member.numbers)}
        return sorted({*range(self._terms.total)} - there)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # closed
                return
            line = Line(connection, self._terms.silence)
            threading.Thread(target=self._hear, args=(line,), daemon=True).start()

    def _hear(self, line: Line) -> None:
        """Listens to one connection until it ends."""
        messages = line.messages()
        try:
            hello = next(messages, {})
            member = _Member(
                line,
                range(hello["first"], hello["first"] + hello["processes"]),
                str(hello["host"]),
                str(hello["id"]),
            )
            refusal = self._refusal(hello, member)
        except (KeyError, TypeError, ValueError):  # not one of ours
            line.close()
            return
        if refusal:
            line.send(refused=refusal)
            line.close()
            return
        for message in messages:
            if "ended" in message:
                process = member.running.get(message["ended"])
                if process is not None:
                    process.over(message["code"], message["lines"])
            elif "told" in message and self._job is not None:
                self._job.tell(message["told"])
        with self._changed:
            if member in self._members:
                self._members.remove(member)
            self._changed.notify_all()
        for process in member.running.values():
            process.over(FAILED, [], lost=True)

    def _refusal(self, hello: Mapping[str, Any], new: _Member) -> str:
        """Adds a supervisor that has come, or returns why it cannot take part."""
        first, last = new.numbers[0], new.numbers[-1]
        terms = self._terms
        if hello["total"] != terms.total:
            return f"--num_processes is {hello['total']} on {new.host} and {terms.total} here"
        if hello["code"] != terms.code:
            return (
                f"the code of meshdsl on {new.host} is {hello['code']}, and {terms.code} on the "
                "first host: install the same version on both"
            )
        if hello["token"] != self._token:
            return (
                f"the workdir on {new.host} is not the one of the first host: it has to be on a "
                "disk that both share"
            )
        with self._changed:
            for old in [member for member in self._members if member.own_id == new.own_id]:
                self._members.remove(old)  # it has come again before its old connection broke
                old.line.close()
            taken = {n: "the first host" for n in self._numbers}
            taken |= {n: member.host for member in self._members for n in member.numbers}
            twice = [n for n in new.numbers if n in taken]
            if twice:
                return (
                    f"{listed(twice)}: {taken[twice[0]]} has the same. Give the supervisor on "
                    f"{new.host} another --first_process"
                )
            if last >= terms.total or first < 0:
                return f"process {last} goes beyond the {terms.total} of --num_processes"
            self._members.append(new)
            self._changed.notify_all()
        return ""
