"""Filling: the order in which a block runs if later work fills the windows of its transfers.

Compilers with a latency-hiding scheduler, as those of TPUs and GPUs are, do not wait for a transfer
while other work is ready. `filled` orders a block in that way, as a list scheduler does: a transfer
begins as soon as its operands are there and its links are free; of the work that is ready, what
stands first in the program runs next; the device waits only if none is ready. So work moves ahead
only where the device would have waited.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Sequence

from meshdsl.lowering.costs.streams import Link
from meshdsl.lowering.program import Block, Instruction

Cost = tuple[int, tuple[Link, ...]]


def filled(block: Block, cost: Callable[[Instruction], Cost]) -> Sequence[Instruction]:
    """Returns the instructions of a block in the order of a list scheduler; see above.

    Args:
        cost: the picoseconds that an instruction takes, and the links that it travels on beside the
            work; without links, the device works.
    """
    costs = [cost(instruction) for instruction in block.instructions]
    if not any(links for _, links in costs):
        return block.instructions
    return _Scheduler(block, costs).run()


class _Scheduler:
    """One run through a block.

    Attributes:
        now: picoseconds since it began.
        missing: for each instruction, how many of those before it have not finished.
        work: those that are ready to run; heap of numbers.
        flights: transfers on their way; heap of (arrival, number).
    """

    def __init__(self, block: Block, costs: Sequence[Cost]) -> None:
        self.instructions = block.instructions
        self.costs = costs
        self.now = 0
        self.order: list[Instruction] = []
        self.work: list[int] = []
        self.flights: list[tuple[int, int]] = []
        self.free: dict[Link, int] = {}
        self.missing = [0] * len(costs)
        self.next: dict[int, list[int]] = defaultdict(list)
        maker = {v: n for n, i in enumerate(block.instructions) for v in i.outputs}
        last_effect: int | None = None
        missing, followers = self.missing, self.next
        for number, instruction in enumerate(block.instructions):
            before = {maker[v] for v in instruction.inputs if v in maker}
            if instruction.has_effect:  # effects keep their order
                if last_effect is not None:
                    before.add(last_effect)
                last_effect = number
            missing[number] = len(before)
            for other in before:
                followers[other].append(number)

    def run(self) -> list[Instruction]:
        for number, missing in enumerate(self.missing):
            if not missing:
                self._ready(number)
        while self.work or self.flights:
            while self.flights and (self.flights[0][0] <= self.now or not self.work):
                arrival, number = heapq.heappop(self.flights)
                self.now = max(self.now, arrival)
                self._finish(number)
            if self.work:
                number = heapq.heappop(self.work)
                self.order.append(self.instructions[number])
                self.now += self.costs[number][0]
                self._finish(number)
        assert len(self.order) == len(self.instructions), "instructions that need each other"
        return self.order

    def _ready(self, number: int) -> None:
        time, links = self.costs[number]
        if not links:
            heapq.heappush(self.work, number)
            return
        self.order.append(self.instructions[number])
        start = max([self.now, *(self.free.get(link, 0) for link in links)])
        self.free.update(dict.fromkeys(links, start + time))
        heapq.heappush(self.flights, (start + time, number))

    def _finish(self, number: int) -> None:
        missing = self.missing
        for follower in self.next.get(number, ()):
            missing[follower] -= 1
            if not missing[follower]:
                self._ready(follower)
