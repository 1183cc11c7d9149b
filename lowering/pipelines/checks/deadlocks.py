"""Deadlocks: finds a cycle of stages that wait for each other.

`deadlock` runs the schedule. It uses the order of the actions only, not their times. The schedule
must follow the rules of `rules.py` and `message_rules.py`. So each action that a stage waits for is
in the row of another stage.
"""

from __future__ import annotations

from meshdsl.lowering.pipelines.actions import RECEIVES, SENDS, Action
from meshdsl.lowering.pipelines.checks.faults import Fault
from meshdsl.lowering.pipelines.dependencies import (
    Link,
    carried,
    link_of,
    needs,
    receive_of,
    send_of,
)
from meshdsl.lowering.pipelines.schedule import Place, Schedule


def deadlock(schedule: Schedule, in_flight: int | None = None) -> Fault | None:
    """Returns the deadlock of a schedule as a fault, or None if all stages finish.

    Args:
        schedule: the schedule.
        in_flight: the most messages in flight on the link from one stage to another. A send waits
            until the link has room. With 0, it waits until the other stage receives. With None,
            there is no limit. The argument matters only if the schedule has sends. A receive
            always waits for its message.
    """
    return _Run(schedule, in_flight).fault()


class _Run:
    """The state of a schedule during its run."""

    def __init__(self, schedule: Schedule, in_flight: int | None) -> None:
        self.schedule, self.in_flight = schedule, in_flight
        self.where = schedule.places
        self.columns = [0] * schedule.stages
        self.unreceived: dict[Link, list[Action]] = {}

    def fault(self) -> Fault | None:
        while any([self._advance(stage) for stage in range(self.schedule.stages)]):
            pass
        rows = self.schedule.rows
        stuck = [s for s, row in enumerate(rows) if self.columns[s] < len(row)]
        return self._cycle(stuck[0]) if stuck else None

    def _advance(self, stage: int) -> bool:
        row, first = self.schedule.rows[stage], self.columns[stage]
        while self.columns[stage] < len(row):
            action = row[self.columns[stage]]
            if action and self._waits_for(stage, action):
                break
            if action and action.kind in SENDS:
                self.unreceived.setdefault(self._link(action), []).append(action)
            elif action and action.kind in RECEIVES:
                self.unreceived[self._link(action)].remove(send_of(carried(action)))
            self.columns[stage] += 1
        return self.columns[stage] > first

    def _waits_for(self, stage: int, action: Action) -> Place | None:
        """Returns the cell that an action waits for, or None if it can run."""
        if action.kind in SENDS:
            return self._room(action)
        if action.kind in RECEIVES:
            send = send_of(carried(action))
            arrived = send in self.unreceived.get(self._link(action), [])
            return None if arrived else self.where[send]
        if self.schedule.has_messages:
            return None  # The results that it needs are in its own row, before it.
        places = (self.where[need] for need in needs(action, self.schedule.chunks))
        return next((place for place in places if self.columns[place[0]] <= place[1]), None)

    def _room(self, send: Action) -> Place | None:
        """Returns the receive that makes room for a send, or None if there is room."""
        waiting = self.unreceived.get(self._link(send), [])
        if self.in_flight is None or len(waiting) < self.in_flight:
            return None
        stage, column = self.where[receive_of(carried([*waiting, send][0]))]
        at_receive = not waiting and self.columns[stage] == column
        return None if at_receive else (stage, column)

    def _link(self, message: Action) -> Link:
        link = link_of(carried(message), self.schedule.placement)
        assert link
        return link

    def _cycle(self, stage: int) -> Fault:
        """Returns the fault of the cycle that a stuck stage belongs to, or waits for."""
        path: list[int] = []
        while stage not in path:
            path.append(stage)
            stage = self._awaited(stage)[0]
        cycle = path[path.index(stage) :]
        first = min(cycle, key=lambda s: (self.columns[s], s))
        cycle = cycle[cycle.index(first) :] + cycle[: cycle.index(first)]
        reasons = []
        for waiting in cycle:
            there, column = self._awaited(waiting)
            reasons.append(
                f"`{self._blocked(waiting)}` waits for `{self.schedule.rows[there][column]}`, "
                f"which is behind `{self._blocked(there)}` on stage {there}"
            )
        there, column = self._awaited(first)
        awaited = self.schedule.rows[there][column]
        return Fault(
            first,
            self.columns[first],
            self._blocked(first),
            "stages wait for each other: " + ", ".join(reasons),
            f"Move `{awaited}` before `{self._blocked(there)}` on stage {there}",
        )

    def _blocked(self, stage: int) -> Action:
        """Returns the action at which a stuck stage waits."""
        action = self.schedule.rows[stage][self.columns[stage]]
        assert action
        return action

    def _awaited(self, stage: int) -> Place:
        """Returns the cell that a stuck stage waits for."""
        place = self._waits_for(stage, self._blocked(stage))
        assert place
        return place
