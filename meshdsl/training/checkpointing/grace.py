"""The time between a signal and the end of a process: whether the run is saved within it.

Schedulers send a signal, and kill the process some seconds later. The run saves in any case: a
checkpoint that is cut off is none, and does no harm.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import jax

from meshdsl.training.checkpointing.newest import newest_saved
from meshdsl.training.processes.watching import report

_EARLY = 1.0  # seconds before the end at which the last line comes, or a tenth of the whole


@dataclass
class Grace:
    """The grace of one process: `begin` at the signal, `saving` before it saves, `end` after it.

    Attributes:
        seconds: from the signal until the process may be killed; None: unknown, nothing is said.
        workdir: the folder of the run.
        says: takes each line.
    """

    seconds: float | None
    workdir: str | os.PathLike[str] | None
    says: Callable[[str], None] = report
    _deadline: float | None = None
    _step: int | None = None
    _timer: threading.Timer | None = None

    def begin(self) -> None:
        """Counts from now, unless it counts already."""
        if self.seconds is None or self._deadline is not None:
            return
        self._deadline = time.monotonic() + self.seconds
        self._timer = threading.Timer(self.seconds - min(_EARLY, self.seconds / 10), self._over)
        self._timer.daemon = True
        self._timer.start()

    def saving(self, step: int, needs: Callable[[], float]) -> None:
        """Says whether there is time enough to save a step; the first process, also if there is.

        Args:
            needs: returns how many seconds it takes; called only if it matters.
        """
        if self._deadline is None:
            return
        self._step = step
        seconds, left = needs(), self._deadline - time.monotonic()
        if seconds > left:
            self.says(
                f"saving step {step:,} takes about {_shown(seconds)}, and {_shown(max(left, 0))} "
                f"are left of --grace={self.seconds:g}: it is tried, but may be cut off. "
                f"{self._then()}"
            )
        elif jax.process_index() == 0:
            self.says(
                f"saving step {step:,} takes about {_shown(seconds)}; {_shown(left)} are left of "
                f"--grace={self.seconds:g}"
            )

    def end(self) -> None:
        """Says that all is saved."""
        if self._timer is not None:
            self._timer.cancel()

    def _over(self) -> None:
        what = "the step at hand has not ended" if self._step is None else "it is not saved yet"
        at = "" if self._step is None else f" step {self._step:,}:"
        self.says(f"--grace={self.seconds:g} is about to end,{at} {what}. {self._then()}")

    def _then(self) -> str:
        found = None if self.workdir is None else newest_saved(self.workdir)
        if found is None:
            return "If it is killed, a restart begins anew: there is no checkpoint"
        return f"If it is killed, a restart goes on from step {found[0]:,}"


def _shown(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:,.0f} s"
