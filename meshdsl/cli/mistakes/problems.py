"""Mistakes on a command line, collected so that one error reports all of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from meshdsl.cli.mistakes.user_errors import plain_text


class UsageError(ValueError):
    """A command line is wrong: one problem, or a numbered list of problems."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        if len(problems) == 1:
            text = problems[0]
        else:
            lines = [f"{len(problems)} problems", ""]
            for number, problem in enumerate(problems, start=1):
                head = f"  {number}. "
                lines.append(head + problem.replace("\n", "\n" + " " * len(head)))
            text = "\n".join(lines)
        super().__init__(text)


class Problems:
    """A list of problems that grows while a command line is being understood."""

    def __init__(self) -> None:
        self.found: list[str] = []
        self._first: ValueError | None = None

    def add(self, problem: str) -> None:
        self.found.append(problem)

    @contextmanager
    def caught(self, label: str) -> Iterator[None]:
        """Adds a ValueError in its block as a problem of `label`, and goes on after the block."""
        try:
            yield
        except ValueError as error:
            self._first = self._first or error
            self.add(f"{label}: {plain_text(error)}")

    def check(self) -> None:
        """Raises one `UsageError` with all problems, if there are any."""
        if self.found:
            raise UsageError(self.found) from self._first
