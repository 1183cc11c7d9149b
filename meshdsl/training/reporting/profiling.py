"""Profiles of some steps of a run, for TensorBoard and Perfetto."""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FOLDER = "profile"  # in the workdir


@dataclass(frozen=True)
class ProfiledSteps:
    """The steps that are profiled: `ProfiledSteps(10, 13)`, both included.

    Raises:
        ValueError: there are none.

    Examples:
        >>> from meshdsl.training import ProfiledSteps
        >>> steps = ProfiledSteps(10, 13)
        >>> steps.last - steps.first + 1
        4
    """

    first: int
    last: int

    def __post_init__(self) -> None:
        if not 1 <= self.first <= self.last:
            raise ValueError(f"there are no steps {self.first}:{self.last}; the first step is 1")

    @staticmethod
    def parse(text: str) -> ProfiledSteps:
        """Reads `first:last`, both included: "10:13"; one number is one step.

        Raises:
            ValueError: the text is not of this form, or there are no such steps.
        """
        first, colon, last = text.partition(":")
        try:
            return ProfiledSteps(int(first), int(last if colon else first))
        except ValueError as error:
            if "there are no" in str(error):
                raise
            raise ValueError(
                f"needs the first and the last step, as in 10:13, got {text!r}"
            ) from None


@dataclass
class Profiler:
    """Records a profile of chosen steps; closed by its with-block.

    Attributes:
        steps: the steps; None: nothing is recorded.
        runtime: the backend's module `runtime`.
        workdir: the run's folder; the profile goes to `profile` in it. None: nothing is recorded.
    """

    steps: ProfiledSteps | None
    runtime: Any
    workdir: str | os.PathLike[str] | None
    _recording: ExitStack = field(default_factory=ExitStack)
    _on: bool = False

    def before(self, first: int, last: int) -> None:
        """Starts the profile before a call with steps `first` to `last`, if they are chosen."""
        if self._on or self.steps is None:
            return
        if first <= self.steps.last and last >= self.steps.first:
            folder = Path(self.workdir or ".") / FOLDER
            self._recording.enter_context(self.runtime.profile(str(folder)))
            self._on = True

    def ends(self, last: int) -> bool:
        """Whether the profile ends with the step `last`, which must be over by then."""
        return self._on and self.steps is not None and last >= self.steps.last

    def close(self) -> None:
        """Ends the profile, which is on disk on return."""
        self._recording.close()
        self._on = False

    def __enter__(self) -> Profiler:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
