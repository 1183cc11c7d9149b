"""Faults: what is wrong with a schedule, where, and how to mend it."""

from __future__ import annotations

from dataclasses import dataclass

from meshdsl.lowering.pipelines.actions import Action


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong with a schedule.

    Attributes:
        stage: the row.
        column: the column in the row, from 0; of an action that is missing, where it belongs at
            the latest.
        action: the action that is wrong, or missing; None if it is the row.
        why: the reason.
        fix: what to do.
    """

    stage: int
    column: int
    action: Action | None
    why: str
    fix: str

    def __str__(self) -> str:
        cell = f", `{self.action}`" if self.action else ""
        return f"stage {self.stage}, column {self.column}{cell}: {self.why}. {self.fix}"


class ScheduleError(ValueError):
    """A schedule is wrong; `fault` is the first thing that is."""

    def __init__(self, name: str, fault: Fault) -> None:
        super().__init__(f"schedule `{name}` is wrong at {fault}")
        self.fault = fault
