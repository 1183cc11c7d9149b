"""Agreement of processes between steps: whether they save or stop, and by which signal.

Guarantees:
    All processes agree on the same result at the same step.
    They agree only about every `seconds`, since each time they wait for each other.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from meshdsl.training.processes.joining import gathered

SECONDS = 5.0


@dataclass
class Agreement:
    """The agreement of the processes of a run.

    Attributes:
        step: the last step at which they agreed, or the one that the run began at.
        every: the number of steps from there to the next agreement.
        seconds: the time between two agreements.
        notes: what each process has noted for all at the last agreement, in their order.
    """

    step: int
    every: int = 1
    seconds: float = SECONDS
    notes: Sequence[Any] = ()
    _time: float = field(default_factory=time.monotonic)

    def due(self, step: int) -> bool:
        """Whether the processes agree after a step."""
        return jax.process_count() == 1 or step >= self.step + self.every

    def settle(
        self, step: int, stops: bool, signal: int | None, note: Any = None, saves: bool = False
    ) -> tuple[bool, int | None, bool]:
        """Returns whether any process stops the run, the signal that one got, whether any saves.

        All processes must call this after the same step.

        Args:
            note: what this process tells the others; JSON must be able to represent it.
            saves: whether it is time for a checkpoint, by the clock of this process.
        """
        if jax.process_count() == 1:
            self.notes = [note]
            return stops, signal, saves
        now = time.monotonic()
        a_step = (now - self._time) / max(step - self.step, 1)
        wanted = max(1, min(int(self.seconds / max(a_step, 1e-9)), 2 * self.every))
        own = json.dumps([stops, signal or 0, wanted, note, saves])
        stop, signals, every, self.notes, save = zip(*map(json.loads, gathered(own)), strict=True)
        self.step, self.every, self._time = step, min(every), now
        return any(stop), max(signals) or None, any(save)
