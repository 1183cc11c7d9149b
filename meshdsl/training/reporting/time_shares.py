"""Where the time of a run goes: steps, compiling, waits for data, saving, evaluations.

Guarantees:
    The host waits for the device nowhere where it would not wait without this, except before it
    copies the state to save it, which waits for the same steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal, TypeAlias

Part: TypeAlias = Literal["compiling", "data", "saving", "evaluating"]
PARTS: tuple[Part, ...] = ("compiling", "data", "saving", "evaluating")
_WORDS = {"data": "waiting for data"}  # for people; other parts are called as they are


class TimeShares:
    """Counts the time of a run from its start, by a clock in seconds.

        shares = TimeShares()
        with shares.spent("saving"):
            save()
        shares.read()["saving_share"]

    Args:
        clock: what tells the time.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self._start = clock()
        self._spent: dict[Part, float] = dict.fromkeys(PARTS, 0.0)
        self._before_steps = 0.0

    def begin_steps(self) -> None:
        """Says that from now on all time that no part has is that of steps."""
        self._before_steps = self.clock() - self._start - sum(self._spent.values())

    @contextmanager
    def spent(self, part: Part) -> Iterator[None]:
        """Counts the time of its block as a part; parts do not overlap."""
        began = self.clock()
        try:
            yield
        finally:
            self.add(part, self.clock() - began)

    def add(self, part: Part, seconds: float) -> None:
        """Counts time as a part that is known only after it has passed."""
        self._spent[part] += seconds

    def read(self) -> dict[str, float]:
        """Returns the share of the time so far that steps had, `steps_share`, and those of parts.

        All steps of this process have a share, also those that a later restart takes again.
        What is left of 1 is the time before the first step that no part has.
        """
        total = self.clock() - self._start
        if not total:
            return {}
        return {f"{part}_share": seconds / total for part, seconds in self.seconds().items()}

    def seconds(self) -> dict[str, float]:
        """Returns the seconds so far of steps, `steps`, and of each part."""
        rest = self.clock() - self._start - self._before_steps - sum(self._spent.values())
        return {"steps": rest} | {str(part): seconds for part, seconds in self._spent.items()}

    def __str__(self) -> str:
        """Says where the time went: `time: 93.1 % steps, 4.2 % compiling`."""
        spent = self.read()
        if not spent:
            return ""
        shares = [(spent["steps_share"], "steps")]
        shares += [(spent[f"{part}_share"], _WORDS.get(part, part)) for part in PARTS]
        shares.append((1 - sum(share for share, _ in shares), "starting"))
        said = [f"{100 * share:.1f} % {word}" for share, word in shares if share >= 0.0005]
        return f"time: {', '.join(said)}"
