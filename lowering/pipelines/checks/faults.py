"""Faults: errors of a schedule, with their position, reason and fix."""

from __future__ import annotations

from dataclasses import dataclass

from meshdsl.lowering.pipelines.actions import Action


@dataclass(frozen=True)
class Fault:
    """One error of a schedule.

    Attributes:
        stage: the row.
        column: the column in the row, from 0. For a missing action, it is the last possible column.
            The text counts columns from 1, as editors and `csv_files` do.
        action: the wrong or missing action; None if the fault concerns the row.
        why: the reason.
        fix: what the user can do.
    """

    stage: int
    column: int
    action: Action | None
    why: str
    fix: str

    def __str__(self) -> str:
        cell = f", `{self.action}`" if self.action else ""
        return f"stage {self.stage}, column {self.column + 1}{cell}: {self.why}. {self.fix}"


class ScheduleError(ValueError):
    """A schedule is incorrect; `fault` is its first fault."""

    def __init__(self, name: str, fault: Fault) -> None:
        super().__init__(f"schedule `{name}` is wrong at {fault}")
        self.fault = fault
