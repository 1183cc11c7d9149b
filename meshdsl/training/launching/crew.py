"""The crew of a job: the processes of its next start, wherever they run.

A supervisor asks its crew for the processes, starts them, and kills them all when one has failed.
The crew of one host is here, that of several is in `hosts`.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from meshdsl.training.launching.children import Child
from meshdsl.training.launching.warm import Warm
from meshdsl.training.processes.meeting import no_free_port

Command = Callable[[Sequence[str]], Sequence[str]]


class Process(Protocol):
    """A process of the job, on this host or on another one; see `children.Child`."""

    number: int
    shown: bool
    began: float
    code: int | None
    ended_at: float  # by `time.monotonic`

    @property
    def host(self) -> str:
        """What messages call its host."""

    def send(self, number: int) -> None:
        """Sends it a signal."""

    def stop(self) -> None:
        """Begins to end it."""

    def kill(self) -> bool:
        """Ends it, and waits; returns whether it has ended, or is another host's concern."""

    @property
    def unkillable(self) -> str:
        """What to report where `kill` did not end it."""

    def lines(self) -> list[str]:
        """Returns its last lines."""

    def end(self) -> str:
        """Says how it ended: `was killed by signal 9 (SIGKILL)`."""


class Job(Protocol):
    """What a crew needs of the supervisor that asks it."""

    @property
    def ending(self) -> bool:
        """Whether a signal has ended the job, or takes this host away: waiting is of no use."""

    def pass_on(self, number: int) -> None:
        """Has every process get a signal that came to another host."""

    def renew(self) -> None:
        """Has all processes save their state and end, so that others can start."""


class Missing(Exception):
    """Processes of the next start have not come."""


class Crew(Protocol):
    """Where the processes of a job run."""

    def assemble(self, job: Job) -> Sequence[Any]:
        """Returns the processes of the next start, when there are enough places for them.

        Raises:
            Missing: hosts did not come.
        """

    def begin(
        self, process: Any, variables: Mapping[str, str], ended: Callable[[Any], None]
    ) -> None:
        """Starts a process; `ended` is called with it, in another thread, when it ends.

        Args:
            variables: variables of its environment, beside those that all have.

        Raises:
            OSError: this host cannot start another process.
        """

    def grows(self) -> bool:
        """Whether the next start would have more processes than the last one."""

    def rehearses(self) -> bool:
        """Whether programs that the next start may need are compiled ahead."""

    def rehearse(self) -> None:
        """Has them compiled, while the processes take steps.

        Raises:
            ValueError: this host has no free port.
        """

    def copies(self) -> list[list[dict[str, Any]]]:
        """Returns what each of the other hosts says of its copies; see `copies.together`."""

    def note_failure(self, process: Any, progress: bool) -> None:
        """Notes which process failed first, and whether the job got on since the failure before."""

    def leave(self) -> str | None:
        """Lets the job go on without this host, from the next start on; called once.

        Returns:
            Why it cannot; None: it can, and `close` comes next, when the processes have ended.
        """

    def close(self, code: int, goes_on: bool = False) -> None:
        """Lets other hosts go: the job has ended with an exit code, or goes on without this one."""


@dataclass
class OneHost:
    """The processes of a job, or of this host's part of it, under one supervisor.

    Attributes:
        command: returns the command line of a process, given the flags that are its own.
        numbers: the numbers of the processes.
        total: how many the job has, where it has more than those.
        coordinator: `host:port` where they meet; None: a port of this host that is free.
        environment: the variables of the processes; None: those of this one.
        warm: the template that they come of, if there is one.
    """

    command: Command
    numbers: range
    total: int | None = None
    coordinator: str | None = None
    environment: Mapping[str, str] | None = None
    warm: Warm | None = None
    _where: str = ""

    def assemble(self, job: Job) -> list[Child]:
        self._where = self.coordinator or f"localhost:{free_port()}"
        return [Child(number, number == self.numbers[0]) for number in self.numbers]

    def begin(
        self, process: Child, variables: Mapping[str, str], ended: Callable[[Child], None]
    ) -> None:
        own = meeting_flags(process.number, self.total or len(self.numbers), self._where)
        environment = {**(self.environment or os.environ), **variables}
        process.start(self.command(own), ended, environment, self.warm)

    def grows(self) -> bool:
        return False

    def rehearses(self) -> bool:
        return False

    def rehearse(self) -> None:
        """The next start has the same programs."""

    def copies(self) -> list[list[dict[str, Any]]]:
        return []

    def note_failure(self, process: Child, progress: bool) -> None:
        """There is no other host to take the place of this one."""

    def leave(self) -> str:
        return ""  # which needs no words: no other host is part of it

    def close(self, code: int, goes_on: bool = False) -> None:
        """There are no other hosts."""


def meeting_flags(number: int, total: int, coordinator: str) -> list[str]:
    """Returns the flags of `train` by which a process finds the others."""
    return [f"--process_id={number}", f"--num_processes={total}", f"--coordinator={coordinator}"]


def free_port() -> int:
    """Returns a port of this host that nothing listens on.

    Raises:
        ValueError: there is none.
    """
    try:
        with socket.create_server(("localhost", 0)) as listener:
            return int(listener.getsockname()[1])
    except OSError as error:
        raise no_free_port("its processes to meet at", error) from error
