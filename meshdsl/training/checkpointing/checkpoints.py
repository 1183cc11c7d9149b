"""Checkpoints: what a run needs to go on, on any mesh and with any layout, written by Orbax.

A checkpoint has the state, the position in the data, and a description of the job. Arrays are
stored by name, without the pads of a mesh. Each process writes and reads the blocks of its own
devices.

Guarantees:
    A checkpoint is complete or absent: Orbax writes it under another name, and renames it.
    Saving copies the state to the host and returns; the writing goes on during the next steps.
    A restored state equals the saved one, to the bit: every file has a checksum, but in a shared
    checkpoint whose run was killed before it was sealed (`seals`). A damaged checkpoint is reported
    and renamed, and the one before it is restored. A checkpoint that cannot be read for another
    reason is an error, which changes nothing. No run starts anew beside damaged checkpoints.
    A checkpoint is data: nothing in it is executed.
"""

from __future__ import annotations

import json
import os
import uuid
import warnings
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import jax
import numpy as np

from meshdsl.tensors.dtypes import short
from meshdsl.tensors.named_array import NamedArray
from meshdsl.training.checkpointing.copies.host_copies import HostCopies
from meshdsl.training.checkpointing.copies.starts import Starts
from meshdsl.training.checkpointing.local_checkpoints import LocalFolder, Unfit
from meshdsl.training.checkpointing.seals import Damaged, missing
from meshdsl.training.checkpointing.shared_checkpoints import SharedFolder
from meshdsl.training.checkpointing.speed import seconds_to_save
from meshdsl.training.processes.joining import gathered, together
from meshdsl.training.state import by_path, tree_like

_MOST = 10  # the most differences in a message


class CheckpointWarning(UserWarning):
    """A checkpoint could not be used; another one was."""


@dataclass(frozen=True)
class Restored:
    """The contents of a checkpoint.

    Attributes:
        step: how many steps had been taken.
        state: the tree that was saved.
        position: the position in the data, as given to `save`.
        config: the description of the job that saved it.
        folder: the checkpoint's folder.
        source: what it is, where it is no checkpoint but copies in memory.
    """

    step: int
    state: Any
    position: Any
    config: dict[str, Any]
    folder: Path
    source: str = ""


class Checkpoints:
    """The checkpoints of one run, closed by its with-block.

        with Checkpoints("runs/first/checkpoints", keep=3) as checkpoints:
            restored = checkpoints.restore(spec)
            ...
            checkpoints.save(step, state, position)

    Args:
        folder: the folder of the checkpoints, the same for all processes.
        keep: how many of the latest are kept.
        keep_best: how many of those with the least `eval_loss` are kept besides.
        config: a description of the job, stored with each as JSON.
        local: a folder for frequent checkpoints, such as on a disk of this machine, which other
            processes need not see; see `save`, and `LocalFolder`.
        host_copies: a folder in memory for copies that outlive the process; see `copy`, and
            `HostCopies`.

    Raises:
        ValueError: a folder cannot be written to.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        keep: int = 3,
        keep_best: int = 1,
        config: Mapping[str, Any] | None = None,
        local: str | os.PathLike[str] | None = None,
        host_copies: str | os.PathLike[str] | None = None,
    ) -> None:
        self.config = dict(config or {})
        self._stack = ExitStack()
        copies = self._stack.enter_context(ExitStack())  # they end when all else is written
        self._kept = self._stack.enter_context(SharedFolder(Path(folder), keep, keep_best))
        run = "" if local is host_copies is None else _name_of_run(self._kept.path)
        self._local = None
        if local is not None:
            self._local = self._stack.enter_context(LocalFolder(Path(local), run))
        self._copies = None
        if host_copies is not None:
            self._copies = copies.enter_context(HostCopies(Path(host_copies), run, self._kept.path))
        self._went_on_from: int | None = 0  # until a save has said it

    def save(
        self,
        step: int,
        state: Any,
        position: Any = None,
        eval_loss: float | None = None,
        local: bool = False,
    ) -> None:
        """Saves a tree of NamedArrays; returns when the arrays may be donated.

        Args:
            step: how many steps have been taken. An existing checkpoint of this step stays.
            position: the position in the data; JSON must be able to represent it.
            eval_loss: the loss by which the best checkpoints are chosen.
            local: whether to save to the local folder.
        """
        to_local = self._local if local else None
        if to_local is not None:
            to_local.prepare(step)
        elif step in self._kept.steps():
            return
        self._abandon_copies(step)
        unpadded, about = self._contents(step, state, position)
        if to_local is not None:
            to_local.save(step, unpadded, about)
        else:
            self._kept.save(step, unpadded, about, eval_loss)

    def _abandon_copies(self, step: int) -> None:
        """Says at the first save of a step that this run has taken that older copies are old.

        A run with copies says it with its first one, but there may be none: memory may be full.
        """
        if self._went_on_from is None or step <= self._went_on_from:
            return
        if self._copies is not None:
            self._copies.abandon_others()
        elif jax.process_index() == 0:
            starts = Starts.read(self._kept.path)
            if starts.last:
                with suppress(OSError):  # what saves says so
                    starts.went_on(starts.begin(), self._went_on_from)
        self._went_on_from = None

    def seconds_to_save(self, state: Any) -> float:
        """Returns about how long it takes until a tree is saved; see `speed.seconds_to_save`."""
        return seconds_to_save(self._kept.save_seconds, by_path(state), self._kept.path)

    def copy(self, step: int, state: Any, position: Any = None) -> None:
        """Copies a tree as `save`, into the folder of copies; at once, and without the others."""
        assert self._copies is not None
        self._copies.save(step, *self._contents(step, state, position))

    def _contents(
        self, step: int, state: Any, position: Any
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Returns the arrays of a checkpoint by path, without pads, and what is beside them."""
        arrays = by_path(state)
        about = {
            "step": step,
            "arrays": {path: _description(array) for path, array in arrays.items()},
            "position": position,
            "config": self.config,
        }
        return {path: _unpadded(array) for path, array in arrays.items()}, about

    def restore(self, like: Any, places: Sequence[Any] | None = None) -> Restored | None:
        """Returns the latest undamaged checkpoint, or None if there are no checkpoints.

        Args:
            like: a tree of `md.spec` or of arrays, like the saved one.
            places: the sharding of each leaf, for arrays without pads. Leaves without one become
                numpy arrays.

        Raises:
            ValueError: the checkpoint is of another model (the message lists every difference); it
                cannot be read though it may be undamaged, and stays as it is; or all checkpoints
                are damaged.
        """
        self.wait()
        wanted = by_path(like)
        where = dict(zip(wanted, places or [None] * len(wanted), strict=True))
        every = (self._copies, self._kept, self._local)  # of equal steps, copies are read fastest
        folders = [folder for folder in every if folder is not None]
        candidates = [(step, folder) for folder in folders for step in folder.steps()]
        problems, unfit = [], dict[str, None]()
        restored = None
        for step, folder in sorted(candidates, key=lambda pair: pair[0], reverse=True):
            path = folder.path / str(step)
            try:
                about = folder.about(step)
                check_same(about["arrays"], wanted, path)
                arrays = folder.load(step, wanted, where)
            except Damaged as damaged:
                aside = folder.set_aside(step)
                where_to = f"kept as {aside}" if aside else "all copies of its step are deleted"
                problems.append(f"checkpoint {path} is damaged: {damaged}; {where_to}")
                _warn(problems[-1])
                continue
            except Unfit as error:
                unfit[str(error)] = None
                continue
            leaves = [NamedArray(arrays[name], leaf.dims) for name, leaf in wanted.items()]
            state = tree_like(like, leaves)
            source = folder.source if isinstance(folder, HostCopies) else ""
            restored = Restored(step, state, about["position"], about["config"], path, source)
            break
        first = self._went_on_from = 0 if restored is None else restored.step
        of_copies = restored is not None and bool(restored.source)
        # Of the last step, some processes may have a copy and others none: the step before is it.
        for text in () if of_copies else unfit:
            _warn(text)
        if self._copies is not None:
            self._copies.go_on_from(first, of_copies)
        if self._local is not None:
            lacking = self._local.lacking(-1 if restored is None else restored.step)
            if lacking:
                _warn(lacking)
        self._warn_if_missing(restored)
        if restored is None:
            _check_none_damaged(folders, problems)
        return restored

    def _warn_if_missing(self, restored: Restored | None) -> None:
        """Warns if the newest checkpoint is gone; the first process looks."""
        if jax.process_index() or (step := missing(self._kept.path)) is None:
            return
        if restored is not None and restored.step >= step:
            return
        instead = "starts anew" if restored is None else f"goes on from step {restored.step:,}"
        _warn(
            f"the newest checkpoint was of step {step:,}, and its folder "
            f"{self._kept.path / str(step)} is gone; the run {instead}"
        )

    def wait(self) -> None:
        """Returns when all that has been saved is on disk."""
        for folder in (self._kept, self._local):
            if folder is not None:
                folder.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)


def _check_none_damaged(
    folders: Sequence[SharedFolder | LocalFolder], problems: Sequence[str]
) -> None:
    """Raises ValueError if a run that starts anew would leave damaged checkpoints behind it."""
    aside = [str(path) for folder in folders for path in sorted(folder.path.glob("damaged.*"))]
    everyones = {path for text in gathered(json.dumps(aside)) for path in json.loads(text)}
    damaged = [*problems, *sorted(p for p in everyones if not any(p in each for each in problems))]
    if damaged:
        first = (
            "every checkpoint is damaged, and a run does not start anew beside them: choose "
            "another workdir, put a copy back, or move these away"
        )
        raise ValueError("\n  ".join([first, *damaged]))


def _warn(text: str) -> None:
    warnings.warn(text, CheckpointWarning, stacklevel=3)


def _name_of_run(folder: Path) -> str:
    """Returns an id that differs between runs with the same settings; the first process draws it.

    Raises:
        ValueError: the id cannot be written to the folder.
    """
    file = folder / "run.id"
    name = ""
    with together():
        if jax.process_index() == 0:
            try:
                if not file.exists():
                    file.write_text(uuid.uuid4().hex)
                name = file.read_text()
            except OSError as error:
                raise ValueError(f"cannot keep {file}: {error.strerror}") from error
    return gathered(name)[0]


def _description(array: Any) -> dict[str, Any]:
    return {
        "dims": [[dim.name, dim.size] for dim in array.dims],
        "dtype": np.dtype(array.dtype).name,
    }


def _unpadded(array: NamedArray) -> Any:
    """Returns an array without pads, on its devices, or on the host if it is not JAX's."""
    return array.unpadded() if isinstance(array.data, jax.Array) else np.asarray(array)


def check_same(saved: Mapping[str, Any], wanted: Mapping[str, Any], folder: Path) -> None:
    """Raises ValueError with the differences between what was saved and what is wanted.

    Args:
        saved: the description of a checkpoint's arrays, by path.
        wanted: arrays or specs, by path.
    """
    now = {path: _description(leaf) for path, leaf in wanted.items()}
    differences = [f"{path}: not in the checkpoint" for path in now if path not in saved]
    differences += [f"{path}: only in the checkpoint" for path in saved if path not in now]
    differences += [
        f"{path}: {_shown(saved[path])} in the checkpoint, {_shown(now[path])} here"
        for path in now
        if path in saved and saved[path] != now[path]
    ]
    if differences:
        rest = [f"... and {len(differences) - _MOST} more"] if len(differences) > _MOST else []
        raise ValueError(
            "\n  ".join([f"checkpoint {folder} is of another model", *differences[:_MOST], *rest])
        )


def _shown(about: Mapping[str, Any]) -> str:
    dims = ", ".join(f"{name}={size}" for name, size in about["dims"])
    return f"{short(np.dtype(about['dtype']))}[{dims}]"
