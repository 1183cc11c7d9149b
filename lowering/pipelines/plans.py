"""Plan: the times of all actions and messages of a schedule, and figures computed from them."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from meshdsl.lowering.pipelines.actions import Action, Kind
from meshdsl.lowering.pipelines.costs import Costs
from meshdsl.lowering.pipelines.dependencies import link_of, needs
from meshdsl.lowering.pipelines.schedule import Schedule


@dataclass(frozen=True)
class Span:
    """One computation of a stage, or one message, in time.

    Attributes:
        stage: the stage that computes or sends.
        column: the column of a computation in the stage's row; -1 for a message.
        action: the computation, or the send.
        start: the time of its start.
        end: the time of its end.
        cause: the span that it waited for; of several, the one with the latest end. None if it
            waited for no span.
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
        spans: the computations of each stage, in order.
        messages: the message of each result that another stage needs.
    """

    schedule: Schedule
    costs: Costs
    spans: tuple[tuple[Span, ...], ...]
    messages: dict[Action, Span]

    @cached_property
    def makespan(self) -> float:
        """The time at which the last stage finishes."""
        return max((row[-1].end for row in self.spans if row), default=0.0)

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """The time in which each stage computes."""
        return tuple(sum(span.end - span.start for span in row) for row in self.spans)

    @cached_property
    def bubbles(self) -> tuple[float, ...]:
        """The time of the makespan in which each stage does not compute."""
        return tuple(self.makespan - busy for busy in self.busy)

    @cached_property
    def bubble(self) -> float:
        """The share of the time of all stages that is bubbles: 0 to 1."""
        return sum(self.bubbles) / (len(self.spans) * self.makespan) if self.makespan else 0.0

    @cached_property
    def pauses(self) -> tuple[float, ...]:
        """The time that each stage waits between its first and its last computation.

        This is the bubble if the stages need not synchronize for the optimizer step (Qi et al.
        2023).
        """
        times = [row[-1].end - row[0].start if row else 0.0 for row in self.spans]
        return tuple(time - busy for time, busy in zip(times, self.busy, strict=True))

    @cached_property
    def live(self) -> tuple[tuple[tuple[float, float], ...], ...]:
        """The activations that each stage keeps: (time, amount from this time on).

        A forward pass keeps `Costs.activations` from its start. The stage frees a part of them at
        the end of `I`, and the rest at the end of `W`, or all at the end of `B`.
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
        """The largest amount of activations that each stage keeps at a time."""
        return tuple(max((amount for _, amount in steps), default=0.0) for steps in self.live)

    @cached_property
    def waiting(self) -> tuple[int, ...]:
        """The largest number of messages of each stage that have arrived before their use."""
        begun = {
            (span.stage, need): span.start
            for row in self.spans
            for span in row
            for need in needs(span.action, self.schedule.chunks)
        }
        changes: list[list[tuple[float, float]]] = [[] for _ in self.spans]
        for result, message in self.messages.items():
            link = link_of(result, self.schedule.placement)
            assert link
            _, receiver = link
            changes[receiver] += [(message.end, 1), (begun[receiver, result], -1)]
        return tuple(round(max((n for _, n in _steps(c)), default=0)) for c in changes)

    @cached_property
    def critical_path(self) -> tuple[Span, ...]:
        """The spans that determine the makespan: each one starts at the end of the one before it.

        The makespan is shorter only if one of these spans is shorter. Messages that take no time
        are omitted.
        """
        span = max((row[-1] for row in self.spans if row), key=lambda s: s.end, default=None)
        path = []
        while span:
            path += [span] if span.end > span.start or span.column >= 0 else []
            span = span.cause
        return tuple(reversed(path))


def _steps(changes: list[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    """Returns (time, sum of all changes up to this time) for each time with a change."""
    at: dict[float, float] = {}
    for time, change in changes:
        at[time] = at.get(time, 0.0) + change
    steps, total = [], 0.0
    for time in sorted(at):
        total += at[time]
        steps.append((time, total))
    return tuple(steps)
