"""Plan: when everything of a schedule happens, and the figures that follow from it."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from meshdsl.lowering.pipelines.actions import Action, Kind
from meshdsl.lowering.pipelines.costs import Costs
from meshdsl.lowering.pipelines.dependencies import needs, receiver
from meshdsl.lowering.pipelines.schedule import Schedule


@dataclass(frozen=True)
class Span:
    """One computation of a stage, or one message, in time.

    Attributes:
        stage: the stage that computes or sends.
        column: the column of a computation in the stage's row; -1 for a message.
        action: the computation, or the send.
        start: when it begins.
        end: when it ends.
        cause: what ended last of all that it had to wait for; None if it waited for nothing.
    """

    stage: int
    column: int
    action: Action
    start: float
    end: float
    cause: Span | None = field(default=None, repr=False, compare=False)


@dataclass(frozen=True)
class Plan:
    """The times of a schedule.

    Attributes:
        schedule: the schedule.
        costs: the times of its actions.
        spans: per stage its computations, in order.
        messages: per result that travels, its message.
    """

    schedule: Schedule
    costs: Costs
    spans: tuple[tuple[Span, ...], ...]
    messages: dict[Action, Span]

    @cached_property
    def makespan(self) -> float:
        """When the last stage has ended."""
        return max((row[-1].end for row in self.spans if row), default=0.0)

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """Per stage, how long it computes."""
        return tuple(sum(span.end - span.start for span in row) for row in self.spans)

    @cached_property
    def bubbles(self) -> tuple[float, ...]:
        """Per stage, how long of the makespan it does not compute."""
        return tuple(self.makespan - busy for busy in self.busy)

    @cached_property
    def bubble(self) -> float:
        """The bubbles of all stages as a share of their time: 0 to 1."""
        return sum(self.bubbles) / (len(self.spans) * self.makespan) if self.makespan else 0.0

    @cached_property
    def pauses(self) -> tuple[float, ...]:
        """Per stage, how long it waits between its first and its last computation.

        This is the bubble if optimizer steps of stages need not be at one time (Qi et al. 2023).
        """
        ends = [(row[0].start, row[-1].end) if row else (0.0, 0.0) for row in self.spans]
        return tuple(
            last - first - busy for (first, last), busy in zip(ends, self.busy, strict=True)
        )

    @cached_property
    def live(self) -> tuple[tuple[tuple[float, float], ...], ...]:
        """Per stage, (time, what it keeps from then on): a step function, in the costs' unit.

        A forward pass keeps `Costs.activations` from its start. They are freed when `B` or `W` has
        ended, a part of them when `I` has.
        """
        return tuple(_steps(self._changes(row)) for row in self.spans)

    def _changes(self, row: tuple[Span, ...]) -> list[tuple[float, float]]:
        return [
            (span.start if result.kind == Kind.FORWARD else span.end, self.costs.kept_by(result))
            for span in row
            for result in span.action.results
        ]

    @cached_property
    def peaks(self) -> tuple[float, ...]:
        """Per stage, the most that it keeps at a time."""
        return tuple(max((amount for _, amount in steps), default=0.0) for steps in self.live)

    @cached_property
    def waiting(self) -> tuple[int, ...]:
        """Per stage, the most messages that have come and are not in use yet."""
        begun = {
            (span.stage, need): span.start
            for row in self.spans
            for span in row
            for need in needs(span.action, self.schedule.chunks)
        }
        changes: list[list[tuple[float, float]]] = [[] for _ in self.spans]
        for result, message in self.messages.items():
            target = receiver(result, self.schedule.placement)
            assert target
            changes[target[1]] += [(message.end, 1), (begun[target[1], result], -1)]
        return tuple(round(max((n for _, n in _steps(c)), default=0)) for c in changes)

    @cached_property
    def critical_path(self) -> tuple[Span, ...]:
        """What the makespan consists of: each span begins when the one before it has ended.

        To shorten the makespan, one of these must be shorter. Messages without a time are left out.
        """
        span = max((row[-1] for row in self.spans if row), key=lambda s: s.end, default=None)
        path = []
        while span:
            path += [span] if span.end > span.start or span.column >= 0 else []
            span = span.cause
        return tuple(reversed(path))


def _steps(changes: list[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    """Returns the sum of all changes until each time at which there is one."""
    at: dict[float, float] = {}
    for time, change in changes:
        at[time] = at.get(time, 0.0) + change
    steps, total = [], 0.0
    for time in sorted(at):
        total += at[time]
        steps.append((time, total))
    return tuple(steps)
