"""Agreement of processes between steps: whether their run ends, and by which signal.

Guarantees:
    All processes agree on the same result at the same step.
    They agree only about every `SECONDS`, since each time they wait for each other.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field

import jax

from meshdsl.training.processes.joining import gathered

SECONDS = 5.0


@dataclass
class Agreement:
    """The agreement of the processes of a run.

    Attributes:
        step: the last step at which they agreed, or the one that the run began at.
        every: the number of steps from there to the next agreement.
    """

    step: int
    every: int = 1
    _time: float = field(default_factory=time.monotonic)

    def due(self, step: int) -> bool:
        """Whether the processes agree after a step."""
        return jax.process_count() == 1 or step >= self.step + self.every

    def settle(self, step: int, stops: bool, signal: int | None) -> tuple[bool, int | None]:
        """Returns whether any process stops the run, and the signal that one of them got.

        All processes must call this after the same step.
        """
        if jax.process_count() == 1:
            return stops, signal
        now = time.monotonic()
        a_step = (now - self._time) / max(step - self.step, 1)
        wanted = max(1, min(int(SECONDS / max(a_step, 1e-9)), 2 * self.every))
        answers = [json.loads(text) for text in gathered(json.dumps([stops, signal or 0, wanted]))]
        self.step, self.every, self._time = step, min(each for *_, each in answers), now
        return any(one for one, *_ in answers), max(given for _, given, _ in answers) or None
