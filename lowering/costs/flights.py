"""Flights: transfers with their times, and the order in which links serve them.

A link of a torus serves first what is ready first. The second step of a gather is ready when the
first has arrived, so the first steps of other gathers go before it. `queued` puts the starts of
transfers in this order among the steps of a block, by a run from idle links. A GPU has one queue of
collectives, which it serves in the order of the program.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from meshdsl.lowering.costs.streams import Key, Link, Start, Step, Wait
from meshdsl.lowering.transfers import Chain, Transfer


@dataclass(frozen=True, eq=False, slots=True)
class Flight:
    """A transfer, its picoseconds and its links, and whether it travels beside work."""

    transfer: Transfer
    time: int
    links: tuple[Link, ...]
    beside: bool


@dataclass(frozen=True, eq=False, slots=True)
class Sent:
    """A chain of transfers, and what each of them takes."""

    chain: Chain
    flights: tuple[Flight, ...]


def queued(
    steps: Sequence[Step],
    starts: Mapping[int, Sequence[Start]],
    time: Callable[[Step], int],
    in_turn: bool = False,
) -> list[Step]:
    """Returns the steps of a block with the starts of its transfers, in the order of readiness.

    A start stands before the step in which it becomes ready, and before the wait for it.

    Args:
        starts: those whose operands are there before the step at a position, but for what other
            transfers bring.
        time: the picoseconds of a step that is work.
        in_turn: whether transfers are served in the order given, as soon as their operands are
            there but for what other transfers bring.
    """
    if in_turn:
        ordered: list[Step] = []
        for at, step in enumerate([*steps, None]):
            ordered += starts.get(at, ())
            if step is not None:
                ordered.append(step)
        return ordered
    return _Queue(steps, starts, time).run()


class _Queue:
    """One run through the steps.

    Attributes:
        now: picoseconds since it began.
        ready: starts whose predecessors have begun; heap of (when they have arrived, number, ...).
        blocked: for a transfer that has not begun, the starts that wait for this.
        arrivals: when transfers that have begun arrive; `free`: when links are.
    """

    def __init__(
        self,
        steps: Sequence[Step],
        starts: Mapping[int, Sequence[Start]],
        time: Callable[[Step], int],
    ) -> None:
        self.steps, self.starts, self.time = steps, starts, time
        self.now = self.number = 0
        self.ready: list[tuple[int, int, Start]] = []
        self.blocked: dict[Key, list[Start]] = {}
        self.arrivals: dict[Key, int] = {}
        self.free: dict[Link, int] = {}
        self.ordered: list[Step] = []

    def run(self) -> list[Step]:
        for position, step in enumerate(self.steps):
            self._add(position)
            if isinstance(step, Wait):
                while step.key not in self.arrivals:
                    self._begin_next()
                self.now = max(self.now, self.arrivals[step.key])
            elif isinstance(step, Start):
                self._begin_until(self.now)
                self._begin(step, self.now)
                continue
            else:
                self.now += self.time(step)
            self._begin_until(self.now)
            self.ordered.append(step)
        self._add(len(self.steps))
        while self.ready:
            self._begin_next()
        assert not self.blocked, "transfers that need each other"
        return self.ordered

    def _add(self, position: int) -> None:
        for start in self.starts.get(position, ()):
            self._wait_or_push(start)

    def _wait_or_push(self, start: Start) -> None:
        ready = self.now
        for key in start.after:
            if key not in self.arrivals:
                self.blocked.setdefault(key, []).append(start)
                return
            ready = max(ready, self.arrivals[key])
        self.number += 1
        heapq.heappush(self.ready, (ready, self.number, start))

    def _begin_until(self, moment: int) -> None:
        while self.ready and self.ready[0][0] <= moment:
            self._begin_next()

    def _begin_next(self) -> None:
        ready, _, start = heapq.heappop(self.ready)
        self._begin(start, ready)

    def _begin(self, start: Start, ready: int) -> None:
        end = max([ready, *(self.free.get(link, 0) for link in start.links)]) + start.time
        self.free.update(dict.fromkeys(start.links, end))
        self.arrivals[start.key] = end
        self.ordered.append(start)
        for other in self.blocked.pop(start.key, ()):
            self._wait_or_push(other)
