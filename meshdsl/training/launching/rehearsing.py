"""A rehearsal: a process that compiles what a start with fewer processes would, ahead of it.

While a job trains on CPUs, its supervisors start one such process for each place that is left when
the largest host is lost, at the lowest priority. A program is compiled for all devices of a job, so
they join as those of that start would; then each leaves the others and compiles alone. That start
finds the programs (see `backends/jax/kept`).

Guarantees:
    It has no state, reads no checkpoint, and writes nothing but programs.
    Whatever becomes of it, the job goes on.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from meshdsl.training.exit_codes import UNFINISHED
from meshdsl.training.launching.children import Child

if TYPE_CHECKING:
    from meshdsl.training.launching.terms import Host

REHEARSAL = "MESHDSL_LAUNCH_REHEARSAL"  # the variable by which a supervisor asks for one
_LOWEST = 19
_FIRST_TO_END = "1000"  # where memory runs out, the kernel ends this process, and not the job's


@dataclass
class Rehearsals:
    """The rehearsals that a supervisor has started on its host."""

    _children: list[Child] = field(default_factory=list)

    def start(
        self,
        host: Host,
        number: int,
        flags: Sequence[str],
        variables: Mapping[str, str],
        finished: Callable[[], None],
    ) -> None:
        """Starts one, beside those that there are. Nothing waits for it.

        Args:
            finished: called in another thread when it has compiled all its programs.
        """

        def ended(child: Child) -> None:
            if not any(one is child for one in self._children):  # `end` has ended it
                return
            if child.code == UNFINISHED:
                finished()
                return
            *_, last = ["", *child.lines()]
            host.report(f"what compiles ahead {child.end()}, and the job goes on: {last}")

        child = Child(number, False)
        self._children.append(child)
        environment = {**host.environment, **variables}
        try:
            child.start(host.command(flags), ended, environment, host.warm)
        except OSError as error:
            host.report(f"nothing compiles ahead on this host: {error.strerror}")

    def end(self) -> None:
        """Ends them all."""
        children, self._children = self._children, []
        for child in children:
            child.stop()
        for child in children:
            child.kill()


def rehearses() -> bool:
    """Whether this process compiles programs ahead, and takes no step."""
    return REHEARSAL in os.environ


def give_way() -> None:
    """Gives this process the lowest priority, with all its threads, and the last claim to memory.

    To join the others comes before: at this priority it would take longer than they wait.
    """
    threads = Path("/proc/self/task")  # on Linux each has a priority of its own
    for thread in os.listdir(threads) if threads.exists() else ("0",):
        with suppress(OSError):  # it has ended
            os.setpriority(os.PRIO_PROCESS, int(thread), _LOWEST)
    with suppress(OSError):  # where Linux shares time among sessions, this is what counts
        Path("/proc/self/autogroup").write_text(str(_LOWEST))
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(_FIRST_TO_END)
