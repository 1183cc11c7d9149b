"""Planning: computes the times of all actions and messages of a schedule.

The model of time is as follows:

* A stage does one computation at a time, in the order of its row. Sends, receives and actions on
  weights take no time of a stage.
* There is one link from each stage to each other stage. It carries one message at a time, in the
  order of the sends. A message travels while both stages work.
* If the schedule has sends, a message starts after both stages have reached its send and its
  receive. If it has none, a message starts when its result is computed.

Guarantees: a plan depends on the schedule and the costs only. Only a schedule that `checking.check`
accepts has a plan.
"""

from __future__ import annotations

from collections import deque

from meshdsl.lowering.pipelines.actions import MESSAGES, SENDS, Action
from meshdsl.lowering.pipelines.checks.checking import check
from meshdsl.lowering.pipelines.costs import Costs
from meshdsl.lowering.pipelines.dependencies import Link, carried, link_of, needs, send_of
from meshdsl.lowering.pipelines.plans import Plan, Span
from meshdsl.lowering.pipelines.schedule import Schedule


def plan(schedule: Schedule, costs: Costs | None = None) -> Plan:
    """Returns the plan of a schedule: its makespan, bubble, live activations and critical path.

    plan(one_forward_one_backward(4, 8)).bubble  # 3 / 11

    Args:
        schedule: a correct schedule.
        costs: the times of the actions. By default F = I = W = 1 and B = 2.

    Raises:
        ValueError: `checking.check` rejects the schedule, or `costs` has another number of chunks.
    """
    costs = costs or Costs()
    check(schedule)
    costs.fit(schedule.chunks)
    return _Clock(schedule, costs).run()


class _Clock:
    """The state of a schedule during its run."""

    def __init__(self, schedule: Schedule, costs: Costs) -> None:
        self.schedule, self.costs = schedule, costs
        self.spans: list[list[Span]] = [[] for _ in schedule.rows]
        self.columns = [0] * schedule.stages
        self.computed: dict[Action, Span] = {}
        self.messages: dict[Action, Span] = {}
        self.last: dict[Link, Span] = {}
        # Sends that wait for their receive. Per result, the computation before its receive.
        self.posted: dict[Link, deque[tuple[Action, Span]]] = {}
        self.awaited: dict[Action, Span | None] = {}

    def run(self) -> Plan:
        while any([self._advance(stage) for stage in range(self.schedule.stages)]):
            pass
        rows = self.schedule.rows
        assert all(c == len(row) for c, row in zip(self.columns, rows, strict=True))
        return Plan(self.schedule, self.costs, tuple(map(tuple, self.spans)), self.messages)

    def _advance(self, stage: int) -> bool:
        """Runs a stage until it must wait; returns whether it did any action."""
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
        if action.kind in MESSAGES:
            result = carried(action)
            link = link_of(result, self.schedule.placement)
            assert link
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
            link = link_of(result, self.schedule.placement)
            if link and not self.schedule.has_messages:
                self._send(result, link, [span])
        return True

    def _deliver(self, link: Link) -> None:
        """Sends the messages of a link for which both stages are ready."""
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
    """Returns the latest end of some spans, and the first span with this end."""
    cause = max(causes, key=lambda span: span.end, default=None)
    return (cause.end, cause) if cause else (0.0, None)
