"""The starts of jobs that keep copies in memory: `starts.json` beside the checkpoints.

Each start has a number, and goes on from some step. What earlier starts have copied of later steps
is of a line of training that was abandoned: a host that was away may still hold it.

Guarantees:
    Numbers grow over all jobs in a workdir, also after ends that leave no copies.
    Only what has taken a step abandons anything.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_NAME = "starts.json"


@dataclass
class Starts:
    """The starts in a folder of checkpoints: `Starts.read(folder)`.

    Attributes:
        last: the number of the last one; 0: there was none.
        begun: numbers of starts that have taken a step, and the step from which each went on.
    """

    file: Path
    last: int = 0
    begun: list[tuple[int, int]] = field(default_factory=list)

    @classmethod
    def read(cls, folder: Path) -> Starts:
        """Returns what the folder says; a file that is not there or is cut off says nothing."""
        starts = cls(folder / _NAME)
        try:
            starts.take(json.loads(starts.file.read_text()))
        except (OSError, ValueError, TypeError, KeyError):
            return cls(folder / _NAME)
        return starts

    def said(self) -> dict[str, Any]:
        """Returns what the file has."""
        return {"last": self.last, "begun": self.begun}

    def take(self, said: Any) -> None:
        """Takes over what a file has."""
        self.last = int(said["last"])
        self.begun = [(int(number), int(step)) for number, step in said["begun"]]

    def begin(self, others: int = 0) -> int:
        """Returns the number of a new start, above all in the file and above `others`.

        Raises:
            OSError: it cannot be written down.
        """
        self.last = max(self.last, others) + 1
        self._write()
        return self.last

    def went_on(self, number: int, step: int) -> None:
        """Says that a start has taken its first step, after the one from which it went on.

        Raises:
            OSError: it cannot be written down.
        """
        earlier = [entry for entry in self.begun if entry[1] < step]  # it says less of the others
        self.begun = [*earlier, (number, step)]
        self._write()

    def current(self, number: int, step: int) -> bool:
        """Whether a step of a start is of the line of training that the last start goes on with."""
        return all(step <= first for later, first in self.begun if later > number)

    def _write(self) -> None:
        part = self.file.with_suffix(f".{os.getpid()}.part")
        part.write_text(json.dumps(self.said()))
        part.replace(self.file)
