"""Planning: when everything of a schedule happens, for given times.

The model of time. A stage does one computation at a time, in the order of its row. A message goes
off when its result is computed (or where its send stands in the row, if the schedule has sends)
and travels beside the work of both stages. From one stage to another there is one link. It carries
one message at a time, in the order in which they are sent. If the schedule has sends, a message
also waits until its receive is reached. Sends, receives and actions on weights take no time of a
stage.

Guarantees: a plan follows from the schedule and the costs alone, and only a schedule that
`checking.check` accepts has one.
"""

from __future__ import annotations

from collections import deque

from meshdsl.lowering.pipelines.actions import RECEIVES, SENDS, Action
from meshdsl.lowering.pipelines.checks.checking import check
from meshdsl.lowering.pipelines.costs import Costs
from meshdsl.lowering.pipelines.dependencies import carried, needs, receiver, send_of
from meshdsl.lowering.pipelines.plans import Plan, Span
from meshdsl.lowering.pipelines.schedule import Schedule

Link = tuple[int, int]


def plan(schedule: Schedule, costs: Costs | None = None) -> Plan:
    """Returns the plan of a schedule, with its makespan, bubble, live activations, critical path.

    plan(one_forward_one_backward(4, 8)).bubble  # 3 / 11

    Args:
        schedule: a correct schedule.
        costs: the times; by default F = I = W = 1, and B twice that.

    Raises:
        ValueError: The schedule is wrong, as `checking.check` says; or costs per chunk are of
            another number of chunks.
    """
    costs = costs or Costs()
    check(schedule)
    costs.fit(schedule.chunks)
    return _Clock(schedule, costs).run()


class _Clock:
    """A schedule that is under way."""

    def __init__(self, schedule: Schedule, costs: Costs) -> None:
        self.schedule, self.costs = schedule, costs
        self.spans: list[list[Span]] = [[] for _ in schedule.rows]
        self.columns = [0] * schedule.stages
        self.computed: dict[Action, Span] = {}
        self.messages: dict[Action, Span] = {}
        self.last: dict[Link, Span] = {}
        # Sends whose receive is not reached, and, per result, what its receive comes after.
        self.posted: dict[Link, deque[tuple[Action, Span]]] = {}
        self.awaited: dict[Action, Span | None] = {}

    def run(self) -> Plan:
        while any([self._advance(stage) for stage in range(self.schedule.stages)]):
            pass
        rows = self.schedule.rows
        assert all(c == len(row) for c, row in zip(self.columns, rows, strict=True))
        return Plan(self.schedule, self.costs, tuple(map(tuple, self.spans)), self.messages)

    def _advance(self, stage: int) -> bool:
        """Runs the row of a stage as far as it goes; returns whether it went on at all."""
        row, first = self.schedule.rows[stage], self.columns[stage]
        while self.columns[stage] < len(row) and self._act(stage, row[self.columns[stage]]):
            self.columns[stage] += 1
        return self.columns[stage] > first

    def _act(self, stage: int, action: Action | None) -> bool:
        if action is None:
            return True
        if action.computes:
            return self._compute(stage, action)
        previous = self.spans[stage][-1] if self.spans[stage] else None
        if action.kind in SENDS | RECEIVES:
            result = carried(action)
            placement = self.schedule.placement
            target = receiver(result, placement)
            assert target
            link = (placement[result.chunk], target[1])
            if action.kind in SENDS:
                assert previous
                self.posted.setdefault(link, deque()).append((result, previous))
            else:
                self.awaited[result] = previous
            self._deliver(link)
        return True

    def _compute(self, stage: int, action: Action) -> bool:
        causes = self.spans[stage][-1:]
        for need in needs(action, self.schedule.chunks):
            here = self.schedule.placement[need.chunk] == stage
            cause = (self.computed if here else self.messages).get(need)
            if cause is None:
                return False
            causes.append(cause)
        start, cause = _latest(causes)
        end = start + self.costs.seconds(action)
        span = Span(stage, self.columns[stage], action, start, end, cause)
        self.spans[stage].append(span)
        for result in action.results:
            self.computed[result] = span
            target = receiver(result, self.schedule.placement)
            if target and not self.schedule.has_messages:
                self._send(result, (stage, target[1]), [span])
        return True

    def _deliver(self, link: Link) -> None:
        """Sends what both stages of a link are ready for."""
        posted = self.posted.get(link)
        while posted and posted[0][0] in self.awaited:
            result, sender = posted.popleft()
            receiving = self.awaited[result]
            self._send(result, link, [sender, *([receiving] if receiving else [])])

    def _send(self, result: Action, link: Link, causes: list[Span]) -> None:
        start, cause = _latest([*causes, *([self.last[link]] if link in self.last else [])])
        end = start + self.costs.message_seconds(result)
        message = Span(link[0], -1, send_of(result), start, end, cause)
        self.last[link] = self.messages[result] = message


def _latest(causes: list[Span]) -> tuple[float, Span | None]:
    """Returns when the last of some spans ends, and that span: the first one of several."""
    cause = max(causes, key=lambda span: span.end, default=None)
    return (cause.end, cause) if cause else (0.0, None)
