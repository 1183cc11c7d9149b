"""The supervisor of one host of several: it leads, or does what another one says."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from meshdsl.training.exit_codes import FAILED
from meshdsl.training.launching.crew import Command
from meshdsl.training.launching.events import NAME, Events, newest
from meshdsl.training.launching.hosts import Hosts, Terms
from meshdsl.training.launching.leading import Succession, Superseded
from meshdsl.training.launching.member import Member
from meshdsl.training.launching.supervisor import Launch, Supervisor


@dataclass(frozen=True)
class HostSupervisor:
    """Supervises the processes of one host until the job is over: `run` returns the exit code.

    Attributes:
        numbers: the numbers of the processes on this host.
        command: returns the command line of a process, given the flags that are its own.
        environment: the variables of the processes.
        patience: seconds for which it waits for other hosts, at first and after a loss.
        report: takes each line that it writes.
        restarts: how often all are started again within how many seconds, where this host leads.
        shrink_after: seconds after which fewer processes, or spare hosts, go on.
        copies: this host's folder of copies in memory.
        spare: whether this host waits until another one is lost.
    """

    terms: Terms
    numbers: range
    command: Command
    environment: Mapping[str, str]
    workdir: Path
    patience: tuple[float, float]
    report: Callable[[str], None]
    restarts: tuple[int, float]
    shrink_after: float = 0.0
    copies: Path | None = None
    spare: bool = False

    def run(self) -> int:
        """Returns the exit code of the job.

        Raises:
            ValueError: the other hosts did not come, refuse this one, or it cannot listen.
        """
        leads, joined = not self.spare and self.numbers[0] == 0, False
        while True:
            end = self._member(leads, joined).run()
            if isinstance(end, int):
                return end
            try:
                return self._leader(end).run()
            except Superseded:
                self.report(
                    "another supervisor leads the job now: the processes of this host are "
                    "stopped, and start as it says"
                )
            leads, joined = False, True

    def _member(self, leads: bool, joined: bool) -> Member:
        return Member(
            self.terms,
            self.numbers,
            self.command,
            self.environment,
            self.workdir,
            self.patience,
            self.report,
            self.copies,
            self.spare,
            leads,
            joined,
            self.shrink_after,
        )

    def _leader(self, succession: Succession) -> Supervisor:
        terms = self.terms
        if succession.coordinator is not None:
            terms = replace(terms, coordinator=succession.coordinator, moved=True)
            gone = "has left the job" if succession.left else "is lost"
            self.report(
                f"the first supervisor {gone}: the one of this host, at {terms.coordinator}, "
                "leads the job from now on"
            )
        crew = Hosts(
            terms,
            self.numbers,
            self.command,
            self.environment,
            self.workdir,
            self.patience,
            self.report,
            self.shrink_after,
            self.copies,
            succession.starts,
            {one.own_id: one.host for one in succession.others},
        )
        launch = Launch(crew, self.workdir, *self.restarts, self.report, self.copies)
        if succession.starts and not succession.left:
            reached = newest(self.workdir, self.copies)
            Events(self.workdir / NAME).write(
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
