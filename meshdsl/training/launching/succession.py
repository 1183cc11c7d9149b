"""The supervisor of one host of several: it leads, or does what another one says."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace

from meshdsl.training.checkpointing.copies.together import said, together_with
from meshdsl.training.exit_codes import FAILED
from meshdsl.training.launching.events import (
    NAME,
    Events,
    first_step,
    newest,
    readable_events,
    repeated_seconds,
)
from meshdsl.training.launching.hosts import Hosts
from meshdsl.training.launching.leading import Succession, Superseded
from meshdsl.training.launching.member import Member
from meshdsl.training.launching.supervisor import Launch, Supervisor
from meshdsl.training.launching.terms import Host


@dataclass(frozen=True)
class HostSupervisor:
    """Supervises the processes of one host until the job is over: `run` returns the exit code.

    Attributes:
        restarts: how often all are started again within how many seconds, where this host leads.
    """

    host: Host
    restarts: tuple[int, float]

    def run(self) -> int:
        """Returns the exit code of the job.

        Raises:
            ValueError: the other hosts did not come, refuse this one, or it cannot listen.
        """
        leads, joined = not self.host.spare and self.host.numbers[0] == 0, False
        while True:
            end = Member(self.host, leads, joined).run()
            if isinstance(end, int):
                return end
            supervisor = self._leader(end)
            try:
                return supervisor.run()
            except Superseded:
                if supervisor.has_unkillable:
                    return FAILED
                self.host.report(
                    "another supervisor leads the job now: the processes of this host are "
                    "stopped, and start as it says"
                )
            leads, joined = False, True

    def _leader(self, succession: Succession) -> Supervisor:
        host = self.host
        if succession.coordinator is not None:
            terms = replace(host.terms, coordinator=succession.coordinator, moved=True)
            host = replace(host, terms=terms)
            gone = "has left the job" if succession.left else "is lost"
            host.report(
                f"the first supervisor, on {succession.host}, {gone}: the one of this host, at "
                f"{terms.coordinator}, leads the job from now on"
            )
        is_away = succession.starts and not succession.left
        away = max(time.time() - succession.lost, 0.0) if is_away else math.inf
        crew = Hosts(host, succession.starts, succession.others, succession.left, away)
        launch = Launch(crew, host.workdir, *self.restarts, host.report, host.copies)
        if is_away:
            _note_loss(host, succession)
        return Supervisor(launch, start=succession.starts)


def _note_loss(host: Host, succession: Succession) -> None:
    """Writes into the record that the supervisor is lost which wrote it."""
    events = Events(host.workdir / NAME)
    began = step = None
    for event in readable_events(events.file):
        if event.get("event") == "started":
            is_it = event.get("start") == succession.starts  # or of an earlier command
            began, step = (event.get("time"), event.get("step")) if is_it else (None, None)
        elif event.get("event") in ("failed", "renewed", "ended"):
            began = None
    if not isinstance(began, int | float):  # it was lost between two starts, and has counted that
        return
    copies = said(host.copies)
    reached = newest(host.workdir, together_with(host.workdir, host.copies))
    # Others may hold what this host lacks of its newest copy.
    versions = [*([] if reached is None else [reached]), *((c["step"], c["time"]) for c in copies)]
    last = max((one for one in versions if one[0] > (step or 0)), default=None)
    ran = succession.lost - began
    stepped = first_step(events.file, succession.starts)
    repeated = repeated_seconds(succession.lost, ran, stepped, last)
    events.write(
        "failed",
        time=round(succession.lost, 3),
        start=succession.starts,
        process=0,  # which the host that leads has, in every start
        host=succession.host,
        code=FAILED,
        cause="is lost: its host had the first supervisor, of which nothing is heard",
        step=None if reached is None else reached[0],
        ran_seconds=round(max(ran, 0.0), 3),
        repeated_seconds=round(repeated, 3),
    )
