"""What several processes settle between steps: whether their run ends, and by which signal.

Guarantees:
    What is settled is the same in every process, and so is the step at which they settle it.
    They settle about every `SECONDS`, since each time they wait for each other.
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
    """Settles things between the processes of a run.

    Attributes:
        step: the last at which they settled, or the run began.
        every: steps from there to the next.
    """

    step: int
    every: int = 1
    _time: float = field(default_factory=time.monotonic)

    def due(self, step: int) -> bool:
        """Whether the processes settle after a step."""
        return jax.process_count() == 1 or step >= self.step + self.every

    def settle(self, step: int, ends: bool, signal: int | None) -> tuple[bool, int | None]:
        """Returns whether the run ends for any of the processes, and a signal that one was given.

        All of them must ask after the same step.
        """
        if jax.process_count() == 1:
            return ends, signal
        now = time.monotonic()
        a_step = (now - self._time) / max(step - self.step, 1)
        wanted = max(1, min(int(SECONDS / max(a_step, 1e-9)), 2 * self.every))
        told = [json.loads(text) for text in gathered(json.dumps([ends, signal or 0, wanted]))]
        self.step, self.every, self._time = step, min(each for *_, each in told), now
        return any(one for one, *_ in told), max(given for _, given, _ in told) or None
