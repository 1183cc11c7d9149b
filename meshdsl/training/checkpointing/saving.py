"""When a run saves, and how it goes on from an earlier run's checkpoint."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

from meshdsl.training.checkpointing.checkpoints import Checkpoints, Restored
from meshdsl.training.checkpointing.newest import FOLDER
from meshdsl.training.checkpointing.shared_checkpoints import described
from meshdsl.training.processes.joining import gathered, together
from meshdsl.training.settings import PATH, TRUTH, Number, Whole, check, record, setting

if TYPE_CHECKING:
    from meshdsl.training.data.data_files import DataFiles

ORIGIN = "init_from"  # the setting that names the weights a run began with
_STEPS = (
    "the learning rate depends on `steps`: to train in parts, begin with the final steps, and stop "
    "early with --exit_at_step, or Stops(at_step=...)"
)
DATA = "data_files"  # what the position of a checkpoint calls the state of them


@record
class Saving:
    """What a run keeps of itself: `Saving(every=1000)`.

    If `config` or `data` differ from those of the checkpoint to go on from, the run raises an error
    that lists the differences; with `override` it warns.

    Raises:
        ValueError: values are of another kind, numbers are too small, or only one of `local` and
            `local_every` is given.

    Examples:
        >>> from meshdsl.training import Saving
        >>> saving = Saving(every=1000, config={"width": 64})
        >>> saving.keep, saving.keep_best, saving.resume
        (3, 1, True)
    """

    every: int | None = setting(
        "Steps between two checkpoints. Default: one at the end, or where the run is stopped.",
        Whole(1),
        default=None,
    )
    keep: int = setting("How many of the latest checkpoints are kept.", Whole(1), default=3)
    keep_best: int = setting(
        "How many are kept beside them, by the loss on held-out batches.", Whole(0), default=1
    )
    local: str | os.PathLike[str] | None = setting(
        "Folder for frequent checkpoints, on a disk of this machine that others need not see; the "
        "latest is kept.",
        PATH,
        default=None,
    )
    local_every: int | None = setting("Steps between two of those.", Whole(1), default=None)
    host_copies: str | os.PathLike[str] | None = setting(
        "Folder in memory, /dev/shm/mine, for a copy of the state after every step; a restart "
        "goes on from it, also on other hosts. Two are kept, which take as much of the memory.",
        PATH,
        default=None,
    )
    resume: bool = setting("Go on from the latest checkpoint in the workdir.", TRUTH, default=True)
    override: bool = setting(
        "Go on although settings differ from a checkpoint's, or the machine from a calibration's.",
        TRUTH,
        default=False,
    )
    config: Mapping[str, Any] = setting(
        "The settings of the job, by name; stored with every checkpoint.", default_factory=dict
    )
    defaults: Mapping[str, Any] = setting(
        "What settings mean that `config` lacks, by name.", default_factory=dict
    )
    data: DataFiles | None = setting(
        "The files that the run reads; their checksums are stored with every checkpoint.",
        default=None,
    )
    minutes: float | None = setting(
        "Minutes from one checkpoint to the next, beside or instead of a number of steps.",
        Number(),
        default=None,
    )

    def __post_init__(self) -> None:
        check(self)
        if (self.local is None) != (self.local_every is None):
            raise ValueError("local checkpoints need both a folder and how often they are saved")
        if self.minutes == 0:
            raise ValueError("minutes=0 saves after every step: say every=1, or leave it out")
        try:
            json.dumps([self.config, self.defaults])
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"Saving: config and defaults must be what JSON can write: {error}. Give numbers, "
                "texts, lists and dicts of them"
            ) from None

    def open(self, workdir: str | os.PathLike[str]) -> Checkpoints:
        """Returns the checkpoints of a run.

        Raises:
            ValueError: a folder cannot be written to, or has a run and the options forbid to go on
                with it.
        """
        folder = Path(workdir) / FOLDER
        if not self.resume and begun(workdir):
            raise ValueError(
                f"{folder} has checkpoints of an earlier run, which this one is not to go on from; "
                "choose another workdir, or resume"
            )
        return Checkpoints(
            folder, self.keep, self.keep_best, self.config, self.local, self.host_copies
        )

    def find(
        self, checkpoints: Checkpoints, like: Any, places: Sequence[Any] | None
    ) -> Restored | None:
        """Returns what the run goes on from, or None if it starts anew.

        Raises:
            ValueError: the checkpoint is of another job or model, or all are damaged.
        """
        restored = checkpoints.restore(like, places)
        if restored is None:
            return None
        changes = differences(restored.config, self.config, self.defaults)
        changes += self._changed_data(restored.position)
        if changes and not self.override:
            raise ValueError(refusal(restored.folder, changes))
        if changes:
            warnings.warn(f"going on with other settings: {'; '.join(changes)}", stacklevel=2)
            if self.data is not None:
                self.data.accept()
        return restored

    def _changed_data(self, position: Any) -> list[str]:
        """Returns how the data differs from that of the checkpoint; the first process compares."""
        if self.data is None:
            return []
        own: list[str] = []
        with together():
            if jax.process_index() == 0:
                own = self.data.differences(position.get(DATA))
        changes: list[str] = json.loads(gathered(json.dumps(own))[0])
        return changes

    def due(self, step: int) -> bool:
        return self.every is not None and step % self.every == 0

    def overdue(self, seconds: float) -> bool:
        """Whether so many seconds after the last checkpoint it is time for another one."""
        return self.minutes is not None and seconds >= 60 * self.minutes

    def due_locally(self, step: int) -> bool:
        return self.local_every is not None and step % self.local_every == 0


def origin_of(workdir: str | os.PathLike[str]) -> str | None:
    """Returns the weights that the run in a workdir began with; None: with `init`, or no run."""
    steps = [path for path in (Path(workdir) / FOLDER).glob("*") if path.name.isdigit()]
    for folder in sorted(steps, key=lambda path: -int(path.name)):
        try:
            origin = described(folder)["config"].get(ORIGIN)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            continue  # restoring says what is damaged
        return None if origin is None else str(origin)
    return None


def begun(workdir: str | os.PathLike[str]) -> bool:
    """Whether a run has left a checkpoint in a workdir."""
    return any(path.name.isdigit() for path in (Path(workdir) / FOLDER).glob("*"))


def differences(
    saved: Mapping[str, Any], now: Mapping[str, Any], defaults: Mapping[str, Any]
) -> list[str]:
    """Returns a line for every setting that differs: `learning_rate: 0.001 there, 0.01 here`.

    Args:
        defaults: the values of missing settings.
    """
    # Stored settings went through JSON, which turns tuples into lists and keys into strings.
    defaults, now = json.loads(json.dumps([dict(defaults), dict(now)]))
    saved, now = {**defaults, **saved}, {**defaults, **now}
    names = sorted({*saved, *now} - {ORIGIN})
    return [
        f"{name}: {_shown(saved, name)} in the checkpoint, {_shown(now, name)} here"
        for name in names
        if saved.get(name) != now.get(name)
    ]


def refusal(checkpoint: str | os.PathLike[str], changes: Sequence[str]) -> str:
    """Returns the error of a run that would go on with other settings.

    Args:
        changes: those of `differences`, at least one.
    """
    lines = [
        f"checkpoint {os.fspath(checkpoint)} is of a job with other settings; give them again, "
        "choose another workdir, or go on with the new ones (--override)",
        *changes,
    ]
    return "\n  ".join(lines + [_STEPS] * any(one.startswith("steps: ") for one in changes))


def _shown(settings: Mapping[str, Any], name: str) -> str:
    value = settings.get(name)
    return "none" if value is None else str(value)
