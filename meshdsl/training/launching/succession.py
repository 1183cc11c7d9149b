"""The supervisor of one host of several: it leads, or does what another one says."""

from __future__ import annotations

from dataclasses import dataclass, replace

from meshdsl.training.checkpointing.copies.starts import Starts
from meshdsl.training.checkpointing.copies.together import said, together
from meshdsl.training.checkpointing.newest import FOLDER
from meshdsl.training.exit_codes import FAILED
from meshdsl.training.launching.events import NAME, Events, newest
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
            try:
                return self._leader(end).run()
            except Superseded:
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
                f"the first supervisor {gone}: the one of this host, at {terms.coordinator}, "
                "leads the job from now on"
            )
        crew = Hosts(host, succession.starts, succession.others, succession.left)
        launch = Launch(crew, host.workdir, *self.restarts, host.report, host.copies)
        if succession.starts and not succession.left:
            starts = Starts.read(host.workdir / FOLDER)
            reached = newest(host.workdir, together([said(host.copies)], starts))
            Events(host.workdir / NAME).write(
                "failed",
                time=round(succession.lost, 3),
                start=succession.starts,
                process=0,
                code=FAILED,
                cause="is lost: its host had the first supervisor, of which nothing is heard",
                step=None if reached is None else reached[0],
                ran_seconds=0.0,
                repeated_seconds=0.0,
            )
        return Supervisor(launch, start=succession.starts)
