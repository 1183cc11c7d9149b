"""The supervisor of a host that is not the first: starts and ends processes as the first one says.

It keeps a connection to the first supervisor; see `hosts`. If that breaks, its processes are
killed, since the others start again without them, and it tries to come back. If the first one is
lost for good and enough hosts are left, the first of them in the list that all have leads the job.

Guarantees:
    It starts only the command that it was given, with flags that say which process it is.
    No process goes on without a connection to the first supervisor.
    A host on which SIGKILL does not end a process of a start takes no further part.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from meshdsl.training.checkpointing.copies.together import said
from meshdsl.training.checkpointing.newest import delete_copies
from meshdsl.training.exit_codes import DONE, FAILED, NOTICE, UNFINISHED
from meshdsl.training.launching.children import Child
from meshdsl.training.launching.leading import (
    LEADS,
    Listed,
    Responses,
    Standby,
    Succession,
    ended,
    leader,
    own_name,
    written,
)
from meshdsl.training.launching.lines import Line
from meshdsl.training.launching.rehearsing import Rehearsals
from meshdsl.training.launching.signals import handled
from meshdsl.training.launching.terms import Host
from meshdsl.training.launching.warm import PATIENCE
from meshdsl.training.processes.joining import names_here

_POLL = 0.1  # seconds between two looks at the template
_RETRY = 0.5  # seconds between two attempts to reach the first supervisor
_ANSWER = 5.0  # seconds in which it answers
_ASKED_FOR = 15.0  # seconds for which the first host asks for another one that led the job
_AWAY = 2.0  # seconds after which a first supervisor that is not there is lost
_PASSED_OVER = 15.0  # seconds for which one that does not answer is passed over
_REPORT_AFTER = 5.0  # seconds of waiting before the first report
_REPORT_EVERY = 30.0  # seconds between reports


@dataclass
class Member:
    """Runs a host's processes until the job is over: `Member(...).run()` returns the exit code.

    Attributes:
        leads: whether it leads if no other supervisor does: the first host's, at the beginning.
        joined: whether it has been part of the job, whose end the workdir then tells.
    """

    host: Host
    leads: bool = False
    joined: bool = False
    children: dict[int, Child] = field(default_factory=dict)
    _line: Line | None = None
    _start_number: int = 0
    _waits: bool = False  # whether its processes were stopped, and it has not said more since
    _signal: int | None = None  # the first that came, which decides the exit code
    _reported: set[str] = field(default_factory=set)
    _id: str = field(default_factory=lambda: os.urandom(8).hex())
    _hosts: list[Listed] = field(default_factory=list)  # in the order in which they lead
    _alive: list[Listed] = field(default_factory=list)  # those that stood by, and this one
    _starts: int = 0  # how many starts the job has had, as far as this one knows
    _port: int = 0
    _answered: bool = False
    _left: bool = False  # whether the first supervisor has left the job, which goes on
    _said: str = ""  # what the workdir said of who leads when it was read last
    _rehearsals: Rehearsals = field(default_factory=Rehearsals)
    _first: str = ""  # where the one that it is or was connected to is
    _first_host: str = ""  # what messages call the host of that one
    # When each candidate stood by last.
    _stood_by: dict[str, float] = field(default_factory=dict)
    # Until when places are passed over where something takes connections, and does not answer.
    _silent: dict[str, float] = field(default_factory=dict)

    def run(self) -> int | Succession:
        """Does what the first supervisor says until it says that the job is over, or is lost.

        Returns:
            The exit code of the job; that of a signal that came while it was not connected. Or with
            what this supervisor leads the job from now on.

        Raises:
            ValueError: the first supervisor did not come, or refuses this one.
        """
        # After it has given way to another leader, the others have joined already.
        patience = self.host.patience[1 if self.joined else 0]
        since, lost = time.monotonic(), 0.0
        with handled(self._pass_on, self._kill), Standby() as standby:
            self._port = standby.port
            while True:
                connection = self._connected(patience, since)
                if isinstance(connection, int):
                    return self._over(connection)
                if isinstance(connection, str):
                    others = [one for one in self._alive if one.own_id != self._id]
                    where = connection or None
                    own = self._starts, lost, tuple(others), self._left, self._first_host
                    return Succession(where, *own)
                if connection is None:
                    return self._given_up(patience)
                self._line = Line(connection, self.host.terms.silence)
                try:
                    welcome, code = self._serve(self._line, since + patience)
                finally:
                    heard = time.time() - (time.monotonic() - self._line.heard)
                    self._line.close()
                    self._rehearsals.end()
                    all_ended = self._end_processes()
                if code is not None or not all_ended:
                    return FAILED if code is None else code
                if welcome:
                    patience, since, lost = self.host.patience[1], time.monotonic(), heard
                    self._waits = True
                    self.host.report(
                        f"the first supervisor, at {self._first}, leaves the job: another one leads"
                        if self._left
                        else f"the connection to the first supervisor, at {self._first}, is "
                        "broken: the processes of this host are stopped, until it or another one "
                        "is there"
                    )
                elif not self._answered:  # it stands still, or is something else
                    self._silent[self._first] = time.monotonic() + _PASSED_OVER
                time.sleep(_RETRY)

    def _end_processes(self) -> bool:
        """Ends the processes of this host; returns whether all have ended. Others are reported."""
        children = [*self.children.values()]
        for child in children:
            child.stop()
        reports = [child.unkillable for child in children if not child.kill()]
        for report in reports:
            self._report_once(report)
        return not reports

    def _over(self, code: int) -> int:
        """Returns the exit code of the job, which is over."""
        if code == DONE and self.host.copies is not None:  # none is of use
            delete_copies(self.host.copies)
        return code

    def _given_up(self, patience: float) -> int:
        if self._signal is None:
            raise ValueError(
                f"the first supervisor, at {self.host.terms.coordinator}, was not there for "
                f"{patience:g} s. Start it, or see why it ended"
            )
        return UNFINISHED if self._signal == NOTICE else 128 + self._signal

    def _connected(self, patience: float, since: float) -> socket.socket | str | int | None:
        """Returns a connection to the first supervisor; None: it was not there in time.

        A text is where this one listens, since it leads from now on; empty: at the coordinator. A
        number is the exit code of the job, which ended while this one was cut off.
        """
        report_at = time.monotonic() + _REPORT_AFTER
        while self._signal is None and (now := time.monotonic()) < since + patience:
            if self.joined and (code := ended(self.host.workdir)) is not None:
                return code
            if self._left and self._hosts and self._hosts[0].own_id == self._id:
                self._alive = self._hosts  # all were connected to it
                return self._own_address()
            responses = Responses.of([*self._candidates()])
            if responses.connection is not None:
                self._first = responses.leader
                return responses.connection
            asked = time.monotonic()
            self._stood_by |= dict.fromkeys(responses.standing_by, asked)
            self._silent |= dict.fromkeys(responses.silent, asked + _PASSED_OVER)
            # To ask may take seconds, in which a response does not become older.
            own = self._leads_now(now, asked - since, patience)
            if own is not None and self._signal is None:  # it may have come while others were asked
                return own
            if now >= report_at:
                where = self._where_it_leads
                self.host.report(f"waiting for the first supervisor at {where}: {responses.reason}")
                report_at = now + _REPORT_EVERY
            time.sleep(_RETRY)
        return None

    @property
    def _where_it_leads(self) -> str:
        return leader(self.host.workdir)[1] or self.host.terms.coordinator

    def _candidates(self) -> Iterator[str]:
        """Yields where the first supervisor may be."""
        said, other = leader(self.host.workdir)
        if said != self._said:  # what stood by there may lead now
            self._said = said
            self._silent.clear()
        hosts = (one for one in self._hosts if one.own_id != self._id)
        known = [written(*address) for one in hosts for address in one.addresses()]
        # The coordinator of the command line may lead another job by now.
        first = [other or self.host.terms.coordinator, self.host.terms.coordinator]
        places = [*(first if self.joined else reversed(first)), *known]
        now = time.monotonic()
        passed = {place for place, until in self._silent.items() if now < until}
        passed |= {self.host.terms.coordinator} if self.leads else set()
        yield from dict.fromkeys(place for place in places if place not in passed)

    def _leads_now(self, now: float, seconds: float, patience: float) -> str | None:
        """Returns where this supervisor listens, if it is to lead.

        Args:
            seconds: how long the first one has been away.
            patience: how long it is waited for.
        """
        if self.leads:  # the leader may be out of reach for a moment, as while a network starts
            is_led = self._where_it_leads != self.host.terms.coordinator
            return None if is_led and seconds < min(_ASKED_FOR, patience / 2) else ""
        if not any(one.own_id == self._id for one in self._hosts):
            return None
        counts = [self.host.terms.total]
        if self.host.terms.elastic is not None and (
            self._left or seconds >= self.host.shrink_after
        ):
            counts = self.host.terms.elastic.counts()
        # A supervisor that is about to lead does not listen for an instant.
        standing_by = {place for place, at in self._stood_by.items() if now < at + _AWAY}
        self._alive = alive = [
            one
            for one in self._hosts
            if one.own_id == self._id or {written(*a) for a in one.addresses()} & standing_by
        ]
        if alive[0].own_id != self._id or sum(one.places for one in alive) < min(counts):
            return None
        if seconds < _AWAY:
            return None
        return self._own_address()

    def _own_address(self) -> str:
        """Returns where the others best reach this supervisor."""
        (here,) = (one for one in self._hosts if one.own_id == self._id)
        others = [one for one in self._hosts if one.own_id != self._id]
        return written(own_name(here.names, others), self._port)

    def _serve(self, line: Line, until: float) -> tuple[bool, int | None]:
        """Does what is said, until the connection breaks.

        Args:
            until: when it gives up if it is refused for what may pass.

        Returns:
            Whether it was welcome, and the job's exit code if the job is over.
        """
        line.send(
            id=self._id,
            first=self.host.numbers[0],
            processes=len(self.host.numbers),
            total=self.host.terms.total,
            names=names_here(),
            port=self._port,
            elastic=None if self.host.terms.elastic is None else self.host.terms.elastic.axis,
            spare=self.host.spare,
            code=self.host.terms.code,
            host=socket.gethostname(),
            copies=said(self.host.copies),
            devices=self.host.devices,
            rehearses=self.host.rehearses,
            workdir=str(self.host.workdir),
            token=self._token(),
        )
        welcome = self._answered = False
        threading.Thread(target=self._say_ready, args=(line,), daemon=True).start()
        line.wait(_ANSWER)
        for message in line.messages():
            if message == LEADS:  # the leader may hang all the same
                continue
            self.leads, self._answered = False, True  # one does
            if "refused" in message:
                refusal = f"the first supervisor refuses this one: {message['refused']}"
                if message["lasting"] or time.monotonic() > until - _ANSWER:
                    raise ValueError(refusal)
                self._report_once(refusal)
            elif "over" in message:
                if message.get("leaving"):
                    name = signal.Signals(message["leaving"]).name
                    self.host.report(f"{name} takes this host away: the others go on")
                return welcome, self._over(int(message["over"]))
            elif "welcome" in message:
                welcome = self.joined = True
                self._first_host = message["welcome"]
                self._left = False
                line.wait(self.host.terms.silence)
                if self._signal is not None:  # it came while this one was not connected
                    line.send(signalled=self._signal)
            elif "hosts" in message:
                self._hosts = [Listed.read(one) for one in message["hosts"]]
                self._starts = message["starts"]
                if self.host.spare:
                    where = f"joined the job, which {self._first} leads"
                    self._report_once(f"{where}: waits until another host is lost")
            elif "leaves" in message:
                self._left = True
            elif "start" in message:
                if not self._start(line, message):
                    return welcome, FAILED
            elif "rehearse" in message:
                self._rehearse(line, message)
            elif message.get("of") == self._start_number:
                if "signal" in message:
                    self.children[message["process"]].send(message["signal"])
                elif "kill" in message:
                    self.children[message["kill"]].stop()
        return welcome, None

    def _say_ready(self, line: Line) -> None:
        """Says when a process of this host would begin at once."""
        warm, end = self.host.warm, time.monotonic() + PATIENCE
        while warm is not None and warm.keeps_waiting() and time.monotonic() < end:
            time.sleep(_POLL)
        line.send(ready=True)

    def _start(self, line: Line, message: Mapping[str, Any]) -> bool:
        """Starts a process; those of an earlier start end before. Returns whether they have."""
        if message["of"] != self._start_number:
            self._rehearsals.end()
            if not self._end_processes():
                return False
            if self._waits or message["of"] > self._start_number + 1:
                self.host.report(
                    f"takes part in start {message['of']}, with process {message['start']}"
                )
            self._waits = False
            self.children, self._start_number = {}, message["of"]
        number, of = message["start"], message["of"]
        self._starts = of
        child = self.children[number] = Child(number, message["shown"])

        def tell(code: int | None, lines: list[str]) -> None:
            try:
                copies = said(self.host.copies)
            except Exception as error:  # whatever is in that folder: others wait for this message
                self._report_once(f"copies in {self.host.copies} cannot be read: {error}")
                copies = []
            line.send(ended=number, of=of, code=code, lines=lines, copies=copies)

        def ended(child: Child) -> None:
            tell(child.code, child.lines())

        try:
            environment = {**self.host.environment, **message["variables"]}
            child.start(self.host.command(message["flags"]), ended, environment, self.host.warm)
        except OSError as error:
            lines = [f"it cannot be started on this host: {error.strerror}"]
            tell(FAILED, lines)
        return True

    def _rehearse(self, line: Line, message: Mapping[str, Any]) -> None:
        """Starts a process that compiles programs ahead."""
        number, of = message["rehearse"], message["of"]

        def finished() -> None:
            line.send(rehearsed=number, of=of)

        flags, variables = message["flags"], message["variables"]
        self._rehearsals.start(self.host, number, flags, variables, finished)

    def _report_once(self, text: str) -> None:
        if text not in self._reported:
            self._reported.add(text)
            self.host.report(text)

    def _token(self) -> str:
        """Returns what the first supervisor has written into the workdir."""
        return leader(self.host.workdir)[0]

    def _pass_on(self, number: int) -> None:
        self._signal = self._signal or number
        if self._line is not None:
            self._line.send(signalled=number)

    def _kill(self) -> None:
        for child in [*self.children.values()]:
            child.send(signal.SIGKILL)
