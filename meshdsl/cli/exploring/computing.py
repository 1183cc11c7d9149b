"""Computing: the figures of plans, in processes of their own.

A plan is lowered as `meshdsl explain` lowers it with the same flags, so that both say the same.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from meshdsl.cli.mistakes.user_errors import plain_text, user_text
from meshdsl.cli.sweeping.measures import Setup, Subject
from meshdsl.reports.explain import explain
from meshdsl.reports.explain.values import as_values
from meshdsl.reports.explore.choices import Choice
from meshdsl.reports.sweeps.candidates import Candidate


@dataclass(frozen=True)
class Impossible:
    """The reason why a choice is no plan."""

    reason: str


def prepare(arguments: tuple[str, ...]) -> Callable[[Choice], Iterator[Any]]:
    """Returns the function that computes a choice's values, or the reason why it has none."""
    computer = Computer(arguments)
    return lambda choice: iter([computer.result(choice)])


class Computer:
    """Computes plans of one step; it traces the step once for each microbatches and remat.

    Args:
        arguments: the command line without what choices say.
    """

    def __init__(self, arguments: tuple[str, ...]) -> None:
        self._arguments = arguments
        self._subjects: dict[tuple[int, str], Subject] = {}

    def result(self, choice: Choice) -> dict[str, Any] | Impossible:
        """Returns the values of one choice, or why there are none."""
        try:
            return self.values(choice)
        except ValueError as error:  # the choice does not fit the model
            return Impossible(plain_text(error))
        except Exception as error:  # whatever it is, the other choices go on
            return Impossible(user_text(error) or f"{type(error).__name__}: {error}")

    def values(self, choice: Choice) -> dict[str, Any]:
        """Returns the values of a choice, those of `meshdsl explain --json`."""
        subject = self._subject(choice)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            program = subject.program(Candidate(choice.mesh, choice.layout))
            return as_values(explain(program, subject.hardware("")))

    def _subject(self, choice: Choice) -> Subject:
        key = choice.microbatches, choice.remat
        if key not in self._subjects:
            arguments = (*self._arguments, *choice.flags_of_step())
            self._subjects[key] = Subject.of(Setup(arguments, None))
        return self._subjects[key]
