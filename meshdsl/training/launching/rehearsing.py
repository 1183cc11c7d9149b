"""A rehearsal: a process that compiles what a start with fewer processes would, ahead of it.

While a job trains on CPUs, its supervisors start one such process per host, at the lowest priority.
A program is compiled for all devices of a job, so they join as those of that start would; then each
leaves the others and compiles alone. That start finds the programs (see `backends/jax/kept`).

Guarantees:
    It has no state, reads no checkpoint, and writes nothing but programs and a line of the record.
    Whatever becomes of it, the job goes on.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

from meshdsl.training.launching.events import NAME, Events

REHEARSAL = "MESHDSL_LAUNCH_REHEARSAL"  # the variable by which a supervisor asks for one
_LOWEST = 19


def rehearses() -> bool:
    """Whether this process compiles programs ahead, and takes no step."""
    return REHEARSAL in os.environ


def give_way() -> None:
    """Gives this process, with all its threads, the lowest priority.

    To join the others comes before: at this priority it would take longer than they wait.
    """
    threads = Path("/proc/self/task")  # on Linux each has a priority of its own
    for thread in os.listdir(threads) if threads.exists() else ("0",):
        with suppress(OSError):  # it has ended
            os.setpriority(os.PRIO_PROCESS, int(thread), _LOWEST)
    with suppress(OSError):  # where Linux shares time among sessions, this is what counts
        Path("/proc/self/autogroup").write_text(str(_LOWEST))


def record(workdir: str | os.PathLike[str], processes: int) -> None:
    """Records that the programs are there, and the processor's time that they took here."""
    seconds = round(time.process_time(), 3)
    Events(Path(workdir).absolute() / NAME).write(
        "compiled_ahead", processes=processes, processor_seconds=seconds
    )
