"""A job on several hosts: the first supervisor decides, and those of other hosts do what it says.

All start together and are stopped together, so that nobody waits for a collective with a process
that is gone. A supervisor that comes says which processes it has; see `member` for its side.

Each host has places for processes, and those of spare hosts come last. A start takes the first
places, and numbers its processes anew. With `Elastic` it may take fewer than all.

Guarantees:
    When a process fails, or a host is gone, all hosts know it at once.
    Nothing is started before there are places for all processes, unless fewer can go on.
    If a start has other places than the one before, copies in memory are deleted on all hosts: a
    host that comes back could have some of steps that the others have taken again.
    Other code, other numbers and a workdir that is not shared are refused, with the reason, before
    anything is started.
"""

from __future__ import annotations

import os
import shutil
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meshdsl.training.exit_codes import FAILED, NOTICE, UNFINISHED
from meshdsl.training.launching.children import Child, how_ended
from meshdsl.training.launching.crew import Command, Job, Missing, meeting_flags
from meshdsl.training.launching.elastic import Elastic
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
        elastic: how fewer processes go on; None: they wait.
    """

    coordinator: str
    total: int
    code: str
    silence: float
    elastic: Elastic | None = None

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
    shown: bool
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
    """The supervisor of another host, as it has said.

    Attributes:
        leaves: its host is about to be taken away, or has told it to end.
    """

    line: Line
    numbers: range
    host: str
    own_id: str
    spare: bool
    leaves: int = 0
    running: dict[int, RemoteProcess] = field(default_factory=dict)


class Hosts:
    """The crew of a job on several hosts, in the first supervisor.

    Args:
        numbers: the numbers of the processes on this host.
        command: returns the command line of a process of this host, given its own flags.
        environment: the variables of the processes of this host.
        patience: seconds for which it waits for hosts, before the first start and between two.
        shrink_after: seconds after which fewer processes, or spare hosts, go on.
        copies: this host's folder of copies in memory.
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
        shrink_after: float = 0.0,
        copies: Path | None = None,
    ) -> None:
        self._shrink_after = shrink_after
        self._copies = copies
        self._taken: list[tuple[str, int]] = []  # the places of the last start
        self._counts = [terms.total] if terms.elastic is None else terms.elastic.counts()
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
            self._dismiss_leaving()
            while not (count := self._count(time.monotonic() - began)) and not job.ending:
                now, missing = time.monotonic(), self._missing()
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
            return self._take(self._places()[:count])

    def _count(self, waited: float) -> int:
        """Returns how many processes start now; 0: it waits for more places.

        The first start waits for the hosts with numbers, even where spare ones are there.
        """
        there = len(self._places())
        after = waited >= self._shrink_after
        if there >= self._terms.total and (after or self._starts > 1 or not self._missing()):
            return self._terms.total
        return self._most() if after and self._terms.elastic else 0

    def _most(self) -> int:
        """Returns the largest number of processes for which there are places."""
        there = len(self._places())
        return next((count for count in self._counts if count <= there), 0)

    def _places(self) -> list[tuple[_Member | None, int]]:
        """Returns the places of all hosts in their order; None: this host."""
        places: list[tuple[_Member | None, int]] = [(None, n) for n in self._numbers]
        members = [member for member in self._members if not member.leaves]
        for member in sorted(members, key=lambda one: (one.spare, one.numbers[0])):
            places += [(member, n) for n in member.numbers]
        return places

    def _take(self, places: Sequence[tuple[_Member | None, int]]) -> list[Child | RemoteProcess]:
        """Returns processes in some places, numbered anew."""
        taken = [("" if member is None else member.own_id, n) for member, n in places]
        if self._taken and taken != self._taken:
            self._forget()
        self._taken = taken
        processes: list[Child | RemoteProcess] = []
        hosts: set[_Member | None] = set()
        for each in self._members:
            each.running = {}
        for number, (member, _) in enumerate(places):
            shown = member not in hosts
            hosts.add(member)
            if member is None:
                processes.append(Child(number, shown))
            else:
                member.running[number] = RemoteProcess(number, member, shown)
                processes.append(member.running[number])
        if self._terms.elastic is not None and 0 < len(places) < self._terms.total:
            self._report(
                f"going on with {len(places)} of {self._terms.total} processes, on the mesh "
                f"{self._terms.elastic.mesh_of(len(places))}, until others are there"
            )
        return processes

    def _forget(self) -> None:
        """Deletes copies in memory, on all hosts."""
        if self._copies is not None:
            shutil.rmtree(self._copies, ignore_errors=True)
        for member in self._members:
            member.line.send(forget=True)

    def _dismiss_leaving(self) -> None:
        """Lets hosts go whose processes have saved their state."""
        for member in [member for member in self._members if member.leaves]:
            member.line.send(over=UNFINISHED if member.leaves == NOTICE else 128 + member.leaves)
            self._members.remove(member)

    def grows(self) -> bool:
        with self._changed:
            return self._most() > len(self._taken)

    def begin(
        self,
        process: Child | RemoteProcess,
        variables: Mapping[str, str],
        ended: Callable[[Any], None],
    ) -> None:
        count = len(self._taken)
        flags = meeting_flags(process.number, count, self._terms.meeting)
        if self._terms.elastic is not None:
            flags += self._terms.elastic.flags(count)
            variables = {**variables, **self._terms.elastic.variables}
        if isinstance(process, Child):
            process.start(self._command(flags), ended, {**self._environment, **variables})
            return
        with self._changed:
            process.ended, process.began = ended, time.monotonic()
            gone = process.member not in self._members
        process.member.line.send(
            start=process.number, shown=process.shown, flags=flags, variables=dict(variables)
        )
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
        numbered = [member for member in self._members if not (member.spare or member.leaves)]
        there = {*self._numbers, *(n for member in numbered for n in member.numbers)}
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
                bool(hello["spare"]),
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
                if self._can_lose(member):
                    member.leaves = message["told"]
                    self._job.renew()
                else:
                    self._job.tell(message["told"])
        with self._changed:
            if member in self._members:
                self._members.remove(member)
            self._changed.notify_all()
        for process in member.running.values():
            process.over(FAILED, [], lost=True)

    def _can_lose(self, member: _Member) -> bool:
        """Whether the job goes on without a host that is told to end."""
        left = len(self._places()) - (0 if member.leaves else len(member.numbers))
        return any(count <= left for count in self._counts)

    def _refusal(self, hello: Mapping[str, Any], new: _Member) -> str:
        """Adds a supervisor that has come, or returns why it cannot take part."""
        first, last = new.numbers[0], new.numbers[-1]
        terms = self._terms
        elastic = None if terms.elastic is None else terms.elastic.axis
        if hello["elastic"] != elastic:
            return f"--elastic_axis is {hello['elastic']} on {new.host} and {elastic} here"
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
            for member in self._members:
                taken |= {} if member.spare else {n: member.host for n in member.numbers}
            twice = [] if new.spare else [n for n in new.numbers if n in taken]
            if twice:
                return (
                    f"{listed(twice)}: {taken[twice[0]]} has the same. Give the supervisor on "
                    f"{new.host} another --first_process"
                )
            if not new.spare and (last >= terms.total or first < 0):
                return f"process {last} goes beyond the {terms.total} of --num_processes"
            self._members.append(new)
            self._changed.notify_all()
        return ""
