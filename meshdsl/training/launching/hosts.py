"""A job on several hosts: one supervisor leads, and those of other hosts do what it says.

It is that of the first host; where that is lost, another one (see `leading`), which is then called
the first. All start together and are stopped together, so that nobody waits for a collective with a
process that is gone. A supervisor that comes says which processes it has; see `member` for its
side.

Each host has places for processes, and those of spare hosts come last. A start takes the first
places, and numbers its processes anew. With `Elastic` it may take fewer than all.

Guarantees:
    When a process fails, or a host is gone, all hosts know it at once.
    Nothing is started before there are places for all processes, unless fewer can go on.
    A host that stays where a start goes on with others keeps its number, if it can: its copies in
    memory are then those that its processes need.
    Other code, other numbers and a workdir that is not shared are refused, with the reason, before
    anything is started.
"""

from __future__ import annotations

import math
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from typing import Any

from meshdsl.training.checkpointing.copies.together import Together, of_no_use, together_with
from meshdsl.training.checkpointing.newest import delete_copies
from meshdsl.training.exit_codes import DONE, FAILED, NOTICE, UNFINISHED
from meshdsl.training.launching.children import Child
from meshdsl.training.launching.crew import Job, Missing, free_port, meeting_flags
from meshdsl.training.launching.events import NAME, Events, compiled_counts, newest
from meshdsl.training.launching.job_time import START
from meshdsl.training.launching.leading import (
    LEADS,
    Listed,
    Superseded,
    end,
    lead,
    leader,
    names_of,
)
from meshdsl.training.launching.lines import Line
from meshdsl.training.launching.places import Named, Place, by_host, change, host_of, in_order
from meshdsl.training.launching.rehearsing import REHEARSAL, Rehearsals
from meshdsl.training.launching.remote import RemoteHost, RemoteProcess
from meshdsl.training.launching.terms import Devices, Host, misfit, other_code, other_devices
from meshdsl.training.processes.meeting import accepted, address_of, check_free, listed, listening

_REPORT_AFTER = 5.0  # seconds of waiting before the first report
_REPORT_EVERY = 30.0  # seconds between reports
_POLL = 0.2  # seconds between two looks at who has come
_SILENT = 5.0  # seconds without a beat after which a host that comes again replaces it
_IN_A_ROW = 2  # failures of one host after which others are taken before it
_AT_ANY_COST = 4  # failures in a row after which copies that it alone has are given up
_APART = 0.5  # seconds between two lists of hosts
_GATHERING = 15.0  # seconds in which those that live find one that leads anew


class Hosts:
    """The crew of a job on several hosts, in the first supervisor.

    Args:
        starts: how many starts the job has had under another first supervisor.
        awaited: hosts that live, and will come from that one.
        left: whether that one has left the job; else it is lost.
        away: seconds since it was lost; infinite: nobody waits for it.

    Raises:
        ValueError: it cannot listen at its port, or cannot write to the workdir.
    """

    def __init__(
        self,
        host: Host,
        starts: int = 0,
        awaited: Sequence[Listed] = (),
        left: bool = False,
        away: float = math.inf,
    ) -> None:
        self._host, self._terms, self._workdir = host, host.terms, host.workdir
        self._report, terms = host.report, host.terms
        self._lost_at = time.monotonic()  # when a host was lost last, or the job began
        self._awaited = {one.own_id: one for one in awaited}  # those that have not come yet
        self._awaited_until = self._lost_at + _GATHERING
        # What became of the one before.
        self._before = "the first supervisor " + ("left the job" if left else "was lost")
        self._has_begun = starts > 0
        if starts:
            self._lost_at -= min(away, host.shrink_after)
        self._last: list[tuple[Named, str]] = []  # the places of the last start, and their hosts
        self._blamed: list[str] = []  # which others failed first, one after another, in vain
        self._avoided: set[str] = set()  # hosts that failed again and again
        self._list_is_due = False  # whether a timer sends the list of hosts
        self._list_sent_at = 0.0
        self._counts = [terms.total] if terms.elastic is None else terms.elastic.counts()
        self._starts = starts
        self._superseded = False
        self._leaves = False  # this host leaves the job, which goes on
        self._ends = False  # a signal to another host has ended the job
        self._meeting = ""
        self._job: Job | None = None
        self._members: list[RemoteHost] = []
        self._changed = threading.Condition()
        self._reported: set[str] = set()
        self._rehearsals = Rehearsals()
        self._ahead = 0  # for how many processes programs are compiled ahead
        self._unfinished: set[tuple[int, int]] = set()  # which still compile, of which start
        # For how many processes there are programs.
        self._compiled = compiled_counts(host.workdir / NAME) if starts else set[int]()
        self._devices: set[Devices | None] = set()  # how many the processes of other hosts have had
        port = address_of(terms.coordinator)[1]
        if not starts:  # where its first processes meet
            check_free(port + 1, where=", the one after that of --coordinator")
        self._listener = listening(port, "supervisor of process 0")
        try:
            self._workdir.mkdir(parents=True, exist_ok=True)
            self._token = lead(self._workdir, terms.coordinator)
        except OSError as error:
            self._listener.close()
            raise ValueError(
                f"cannot write to workdir {self._workdir}: {error.strerror}"
            ) from error
        threading.Thread(target=self._accept, daemon=True).start()

    def assemble(self, job: Job) -> list[Child | RemoteProcess]:
        self._job, self._starts = job, self._starts + 1
        began = time.monotonic()
        patience = self._host.patience[self._starts > 1]
        report_at = began + _REPORT_AFTER
        with self._changed:
            for member in self._members:
                member.running = {}
            self._dismiss_leaving()
            while not (count := self._count()) and not job.ending:
                self._check_leads()
                now, missing = time.monotonic(), self._missing()
                if now > began + patience:
                    raise Missing(
                        f"{listed(missing)}: no supervisor came for them within {patience:g} s to "
                        f"{self._terms.coordinator}. Start `meshdsl launch --first_process="
                        f"{missing[0]}` on their host, or see why it ended"
                    )
                if now >= report_at:
                    who = self._awaited_hosts or f"the hosts of {listed(missing)}"
                    self._report(f"waiting for {who}")
                    report_at = now + _REPORT_EVERY
                self._changed.wait(_POLL)
            if job.ending:
                return []
            return self._take(in_order(self._places()[:count], self._last_places))

    def _count(self) -> int:
        """Returns how many processes start now; 0: it waits for more places.

        The first start waits for the hosts with numbers, and then takes spare ones. Later ones take
        those at once, unless the lost host has copies that no other has. That under another first
        supervisor waits for all that live, for their copies.
        """
        if self._awaited and time.monotonic() < self._awaited_until:
            return 0
        if self._awaited:
            self._report(
                f"{self._awaited_hosts}: stood by when {self._before}, but did not come to this "
                f"one within {_GATHERING:g} s. It is not waited for any more: see whether it "
                "reaches this host"
            )
            self._awaited = {}
        there = len(self._places())
        after = time.monotonic() - self._lost_at >= self._host.shrink_after
        if there >= self._terms.total and (
            after or not (self._lacks() if self._starts > 1 else self._missing())
        ):
            return self._terms.total
        return self._most() if after and self._terms.elastic else 0

    def _lacks(self) -> bool:
        """Whether a lost host has copies of later steps than those that are there have together."""
        copies = self._together()
        return of_no_use(copies, self._step_of(copies)) is not None

    def _together(self, without: str | None = None) -> list[Together]:
        """Returns what the hosts that are there have together, also without one of them."""
        others = [one.copies for one in self._members if one.own_id != without and not one.leaving]
        return together_with(self._workdir, self._host.copies, others)

    def _step_of(self, copies: Sequence[Together]) -> int:
        """Returns the newest step that a start can go on from."""
        reached = newest(self._workdir, copies)
        return reached[0] if reached else 0

    @property
    def _awaited_hosts(self) -> str:
        return ", ".join(one.host for one in self._awaited.values())

    def _most(self) -> int:
        """Returns the largest number of processes for which there are places."""
        there = len(self._places())
        return next((count for count in self._counts if count <= there), 0)

    @property
    def _last_places(self) -> list[Named]:
        return [place for place, _ in self._last]

    def _places(self) -> list[Place]:
        """Returns the places of all hosts in their order; None: this host.

        Those of the last start come first, since copies in memory are of these. A host that fails
        again and again comes last, so that a spare one takes its place.
        """
        before = {place.own_id: at for at, place in enumerate(self._last_places)}
        members = [member for member in self._members if not member.leaving]

        def order(member: RemoteHost) -> tuple[int, bool, int]:
            return before.get(member.own_id, len(before)), member.spare, member.numbers[0]

        here = () if self._leaves else self._host.numbers
        places: list[Place] = [(None, n) for n in here]
        for member in sorted(members, key=order):
            places += [(member, n) for n in member.numbers]
        return sorted(places, key=lambda place: Named.of(place).own_id in self._avoided)

    def note_failure(self, process: Child | RemoteProcess, progress: bool) -> None:
        if isinstance(process, Child):  # the host that leads has process 0, in every start
            self._blamed = []
            return
        own_id = process.member.own_id
        self._blamed = [*([] if progress else self._blamed), own_id]
        last = self._blamed[-_IN_A_ROW:]
        if len(last) < _IN_A_ROW or {*last} != {own_id} or own_id in self._avoided:
            return
        with self._changed:
            rest = [one for one in self._places() if Named.of(one).own_id not in self._avoided]
            step, without = self._step_of(self._together()), self._step_of(self._together(own_id))
            has_only_copy = self._lacks() or step != without
        gives_up_copies = len(self._blamed) >= _AT_ANY_COST
        if len(rest) > len(self._last_places) and (gives_up_copies or not has_only_copy):
            self._avoided.add(own_id)
            self._report(
                f"{_IN_A_ROW} starts in a row failed on {process.member.host} first, without a "
                "step between them: the next one takes spare hosts before it. See whether its "
                "devices work (`meshdsl doctor`)"
            )

    def _take(self, places: Sequence[Place]) -> list[Child | RemoteProcess]:
        """Returns processes in some places, numbered anew."""
        self._rehearsals.end()
        self._compiled.add(len(places))
        self._meeting = self._terms.meeting
        if self._starts > 1 and not self._last:  # what the one before had is not known
            self._report(f"start {self._starts} has {by_host(places)}")
        elif changed := change(places, self._last):
            self._report(changed)
        self._last = [(Named.of(place), host_of(place)) for place in places]
        self._has_begun = True
        self._tell_hosts()
        self._devices |= {member.devices for member, _ in places if member is not None}
        processes: list[Child | RemoteProcess] = []
        hosts: set[RemoteHost | None] = set()
        for number, (member, _) in enumerate(places):
            shown = member not in hosts
            hosts.add(member)
            if member is None:
                processes.append(Child(number, shown))
            else:
                member.running[number] = RemoteProcess(number, self._starts, member, shown)
                processes.append(member.running[number])
        if self._terms.elastic is not None and 0 < len(places) < self._terms.total:
            self._report(
                f"going on with {len(places)} of {self._terms.total} processes, on the mesh "
                f"{self._terms.elastic.mesh_of(len(places))}, until others are there"
            )
        return processes

    def _dismiss_leaving(self) -> None:
        """Lets hosts go whose processes have saved their state."""
        for member in [member for member in self._members if member.leaving]:
            code = UNFINISHED if member.leaving == NOTICE else 128 + member.leaving
            member.line.send(over=code, leaving=member.leaving)
            self._members.remove(member)

    def _check_leads(self) -> None:
        """Raises Superseded if the workdir says that another supervisor leads."""
        text, _ = leader(self._workdir)
        if text not in ("", self._token):
            self._superseded = True
            raise Superseded

    def grows(self) -> bool:
        self._check_leads()
        with self._changed:
            taken = self._places()[: self._most()]
            # Else all would stand still while a host imports what its process needs.
            ready = all(member is None or member.ready for member, _ in taken)
            return ready and len(taken) > len(self._last_places)

    def rehearses(self) -> bool:
        here = self._host.rehearses and self._terms.elastic is not None
        return here and all(member.rehearses for member in [*self._members])

    def rehearse(self) -> None:
        """Has programs compiled for as many processes as are left when the largest host is lost."""
        elastic = self._terms.elastic
        assert elastic is not None
        owners = [place.own_id for place in self._last_places]
        left = len(owners) - max(map(owners.count, owners))
        count = next((count for count in self._counts if count <= left), 0)
        if not count or count in self._compiled:
            return
        of, self._ahead = self._starts, count
        self._unfinished = {(number, of) for number in range(count)}
        self._report(
            f"compiling ahead for {count} process{'es' * (count > 1)}, on the mesh "
            f"{elastic.mesh_of(count)}, at the lowest priority; --nocompile_ahead leaves that out"
        )
        where = f"{self._terms.coordinator.rpartition(':')[0]}:{free_port()}"
        # By the number of the start at hand they come of its template, and wait for no other one.
        variables = {**elastic.variables, REHEARSAL: "1", START: str(of)}
        with self._changed:
            lines = {member.own_id: member.line for member in self._members}
        for number, own_id in enumerate(owners[:count]):
            flags = [*meeting_flags(number, count, where), *elastic.flags(count)]
            if own_id in lines:
                lines[own_id].send(rehearse=number, of=of, flags=flags, variables=variables)
            elif not own_id:
                finished = partial(self._rehearsed, number, of)
                self._rehearsals.start(self._host, number, flags, variables, finished)

    def _rehearsed(self, number: int, of: int) -> None:
        """Notes that a rehearsal has finished. When all have, the programs are there."""
        with self._changed:
            last = self._unfinished == {(number, of)}
            self._unfinished.discard((number, of))
            self._compiled |= {self._ahead} if last else set()
        if last:
            Events(self._workdir / NAME).write("compiled_ahead", start=of, processes=self._ahead)

    def begin(
        self,
        process: Child | RemoteProcess,
        variables: Mapping[str, str],
        ended: Callable[[Any], None],
    ) -> None:
        count = len(self._last_places)
        flags = meeting_flags(process.number, count, self._meeting)
        if self._terms.elastic is not None:
            flags += self._terms.elastic.flags(count)
            variables = {**variables, **self._terms.elastic.variables}
        if isinstance(process, Child):
            environment = {**self._host.environment, **variables}
            process.start(self._host.command(flags), ended, environment, self._host.warm)
            return
        with self._changed:
            process.ended, process.began = ended, time.monotonic()
            gone = process.member not in self._members
        process.member.line.send(
            start=process.number,
            of=process.start,
            shown=process.shown,
            flags=flags,
            variables=dict(variables),
        )
        if gone:  # it left after the others were counted
            process.note_end(FAILED, [], lost=True)

    def copies(self) -> list[list[dict[str, Any]]]:
        with self._changed:
            return [member.copies for member in self._members if not member.leaving]

    def leave(self) -> str | None:
        with self._changed:
            needed = self._needed(None)
            self._leaves = self._has_begun and not needed
        if not self._has_begun:
            return "it has not begun, and does not begin without this host"
        return needed or None

    def _left_without(self, member: RemoteHost | None) -> int:
        """Returns how many places are left without a host; None: this one."""
        awaited = sum(one.places for one in self._awaited.values())
        return sum(host is not member for host, _ in self._places()) + awaited

    def _needed(self, member: RemoteHost | None) -> str:
        """Returns why the job cannot go on without a host; empty: it can."""
        left, least = self._left_without(member), min(self._counts)
        if left >= least:
            return ""
        needs = f"needs {least}" if self._terms.elastic else "has no --elastic_axis to go on with"
        return (
            f"the other hosts have places for {left} of its {self._terms.total} processes, and it "
            f"{needs}. A host with --spare would take the place of "
            f"{'this one' if member is None else member.host}"
        )

    def close(self, code: int, goes_on: bool = False) -> None:
        self._rehearsals.end()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        if goes_on:
            with self._changed:
                self._dismiss_leaving()
                self._tell_hosts()
                members, self._members = self._members, []  # none of them is lost from now on
            for member in members:
                member.line.send(leaves=True)
            for member in members:
                member.line.close()
            return
        if code == DONE and self._host.copies is not None:  # none is of use
            delete_copies(self._host.copies)
        if not self._superseded and leader(self._workdir)[0] in ("", self._token):
            with suppress(OSError):
                end(self._workdir, code)
        for member in [*self._members]:
            if not self._superseded:
                member.line.send(over=code)
            member.line.close()

    def _tell_change(self) -> None:
        """Tells all which hosts there are: at once, or a moment later where many come or go."""
        wait = self._list_sent_at + _APART - time.monotonic()
        if wait <= 0:
            self._tell_hosts()
        elif not self._list_is_due:
            self._list_is_due = True
            later = threading.Timer(wait, self._send_due_list)
            later.daemon = True
            later.start()

    def _send_due_list(self) -> None:
        with self._changed:
            if self._list_is_due:
                self._tell_hosts()

    def _tell_hosts(self) -> None:
        """Tells all which hosts there are, in the order in which they lead if this one is lost."""
        self._list_is_due, self._list_sent_at = False, time.monotonic()
        members = [member for member in self._members if not member.leaving]
        hosts = [
            asdict(Listed(one.own_id, tuple(one.names), one.port, len(one.numbers), one.host))
            for one in sorted(members, key=lambda one: (one.spare, one.numbers[0]))
        ]
        for member in members:
            member.line.send(hosts=hosts, starts=self._starts)

    def _missing(self) -> list[int]:
        numbered = [member for member in self._members if not (member.spare or member.leaving)]
        there = {*self._host.numbers, *(n for member in numbered for n in member.numbers)}
        return sorted({*range(self._terms.total)} - there)

    def _accept(self) -> None:
        for connection, address in accepted(self._listener):
            line = Line(connection, self._terms.silence)
            given = line, str(address[0])
            threading.Thread(target=self._hear, args=given, daemon=True).start()

    def _hear(self, line: Line, peer: str) -> None:
        """Listens to one connection until it ends."""
        line.send(**LEADS)
        messages = line.messages()
        hello = next(messages, {})
        try:
            refusal = other_code(hello, self._terms)
            member = RemoteHost(
                line,
                range(hello["first"], hello["first"] + hello["processes"]),
                str(hello["host"]),
                str(hello["id"]),
                bool(hello["spare"]),
                names_of(peer, [str(name) for name in hello["names"]]),
                int(hello["port"]),
                [*hello["copies"]],
                Devices(*hello["devices"]) if hello["devices"] else None,
                bool(hello["rehearses"]),
            )
            lasting = refusal or misfit(hello, self._terms) or self._unfit(member)
            refusal = lasting or self._not_now(hello, member)
        except (KeyError, TypeError, ValueError):  # of other code, or not one of ours
            lasting, member = refusal, None
        if member is None or refusal:
            if refusal:
                line.send(refused=refusal, lasting=bool(lasting))
                self._report_once(f"the supervisor on {hello.get('host')} is refused: {refusal}")
            line.close()
            return
        line.send(welcome=socket.gethostname())
        with self._changed:
            self._tell_change()
        for message in messages:
            if "ended" in message:
                member.copies = message["copies"]
                process = member.running.get(message["ended"])
                if process is not None and process.start == message["of"]:
                    process.note_end(message["code"], message["lines"])
            elif "rehearsed" in message:
                self._rehearsed(message["rehearsed"], message["of"])
            elif "ready" in message:
                member.ready = True
            elif "signalled" in message:
                self._signalled(member, message["signalled"])
        with self._changed:
            if member in self._members:
                self._members.remove(member)
                self._lost(member)
            self._changed.notify_all()
            lost = [one for one in member.running.values() if one.ended is not None]
        for process in lost:  # of others, `begin` finds that the host is gone
            process.note_end(FAILED, [], lost=True)

    def _lost(self, member: RemoteHost) -> None:
        """Notes that a host has gone."""
        self._tell_change()
        if not member.spare or any(one.own_id == member.own_id for one in self._last_places):
            self._lost_at = time.monotonic()

    def _signalled(self, member: RemoteHost, number: int) -> None:
        """Lets a host go that has got a signal, or passes the signal on to all."""
        if self._job is None:
            return
        with self._changed:
            needed = self._needed(member)
            if not needed:
                member.leaving = number
            if not needed and not member.running:
                self._dismiss_leaving()
        if needed:
            if not self._ends and (self._leaves or not self._job.ending):
                name = signal.Signals(number).name
                self._report(f"{name} to {member.host} ends the job: {needed}")
            self._ends = True
            self._job.pass_on(number)
        elif member.running:
            self._job.renew()

    def _report_once(self, text: str) -> None:
        if text not in self._reported:
            self._reported.add(text)
            self._report(text)

    def _unfit(self, new: RemoteHost) -> str:
        """Returns why a host cannot take the place of another one.

        The processes of the first start compare their devices themselves, and know them better.
        What /dev shows is only reported: it may count what no process uses.
        """
        if not new.spare and not self._has_begun:
            return ""
        with self._changed:
            others = {one.devices for one in self._members if not one.spare}
        known = {self._host.devices} | self._devices | others
        given = {one for one in known if one is not None and one.given}
        own = new.devices
        if own is not None and own.given and (differs := other_devices(new.host, own, given)):
            return differs
        if differs := other_devices(new.host, own, known):
            self._report_once(f"as far as /dev shows, {differs}")
        return ""

    def _not_now(self, hello: Mapping[str, Any], new: RemoteHost) -> str:
        """Adds a supervisor that has come, or returns what is in its way."""
        if hello["token"] != self._token:  # a shared disk may show the file of before for a while
            return (
                f"the workdir on {new.host}, {hello['workdir']}, is not the one of the first host, "
                f"{self._workdir}: it has to be on a disk that both share. Or that one has another "
                "job: give each its own --coordinator"
            )
        with self._changed:
            for old in [*self._members]:  # all spare hosts have numbers from 0
                quiet = time.monotonic() - old.line.heard > _SILENT and not (old.spare or new.spare)
                if old.own_id == new.own_id or (quiet and {*old.numbers} & {*new.numbers}):
                    self._members.remove(old)  # it comes again, and its old connection is dead
                    old.line.close()
            owners = {n: socket.gethostname() for n in self._host.numbers}
            for member in self._members:
                owners |= {} if member.spare else {n: member.host for n in member.numbers}
            twice = [] if new.spare else [n for n in new.numbers if n in owners]
            if twice:
                return (
                    f"{listed(twice)}: the supervisor on {owners[twice[0]]} has the same. Give "
                    f"that on {new.host} another --first_process"
                )
            self._members.append(new)
            self._awaited.pop(new.own_id, None)
            self._changed.notify_all()
        return ""
