"""Checkpoints: what a run needs to go on, on any mesh and with any layout, written by Orbax.

A checkpoint holds the whole state, the position in the data, and a description of the job. Arrays
are stored as they are by name, without the pads of a mesh; each process writes and reads what its
own devices hold.

Guarantees:
    A checkpoint is there as a whole or not at all: Orbax writes it aside, and renames it.
    Saving copies the state to the host and returns; the writing goes on behind the next steps.
    What is restored is what was saved, to the bit: every file has a checksum, and a checkpoint that
    is damaged is told, set aside under another name, and the one before it is taken.
    A checkpoint is data: nothing in it is executed.
"""

from __future__ import annotations

import errno
import json
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import jax
import numpy as np

from meshdsl.array import NamedArray, Spec
from meshdsl.dtypes import short
from meshdsl.module import path_of
from meshdsl.training.processes import everywhere
from meshdsl.training.seals import Seals, damage

_MOST = 10  # differences that are told one by one


class CheckpointWarning(UserWarning):
    """A checkpoint could not be used, and another was."""


@dataclass(frozen=True)
class Restored:
    """What a checkpoint held.

    Attributes:
        step: how many steps had been taken.
        state: the tree that was saved.
        position: that of the data, as it was given to `save`.
        config: the description of the job that saved it.
        folder: where it was.
    """

    step: int
    state: Any
    position: Any
    config: dict[str, Any]
    folder: Path


class Checkpoints:
    """The checkpoints of one run, closed by its with-block.

        with Checkpoints("runs/first/checkpoints", keep=3) as checkpoints:
            found = checkpoints.restore(spec)
            ...
            checkpoints.save(step, state, position)

    Args:
        folder: where they are kept, for all processes the same.
        keep: how many of the latest are kept.
        keep_best: how many are kept beside them, of those with the least `eval_loss`.
        config: a description of the job, stored with each; what JSON can hold.
        local: a folder for frequent ones, such as on a disk of this machine, of which the latest is
            kept; see `save`.

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
    ) -> None:
        self.config = dict(config or {})
        self._stack = ExitStack()
        self._kept = self._stack.enter_context(_Folder(Path(folder), keep, keep_best))
        self._local = None
        if local is not None:
            self._local = self._stack.enter_context(_Folder(Path(local), 1, 0))

    def save(
        self,
        step: int,
        state: Any,
        position: Any = None,
        eval_loss: float | None = None,
        local: bool = False,
    ) -> None:
        """Saves a tree of NamedArrays; returns when they may be given up.

        Args:
            step: how many steps have been taken. What is there for it already stays.
            position: that of the data; what JSON can hold.
            eval_loss: by which the best are chosen.
            local: whether it goes to the local folder.
        """
        target = self._local if local and self._local is not None else self._kept
        if step in target.steps():
            return
        arrays = _by_path(state)
        about = {
            "step": step,
            "arrays": {path: _told(array) for path, array in arrays.items()},
            "position": position,
            "config": self.config,
        }
        target.save(step, {path: _whole(a) for path, a in arrays.items()}, about, eval_loss)

    def restore(self, like: Any, places: Sequence[Any] | None = None) -> Restored | None:
        """Returns the latest checkpoint that is whole, or None where there is none.

        Args:
            like: a tree of `md.spec` or of arrays, as was saved.
            places: the sharding that each leaf is to have, of arrays without pads; without it, or
                where one is None, numpy arrays are made.

        Raises:
            ValueError: the checkpoint is of another model, with every difference; or there are
                checkpoints, but all of them are damaged.
        """
        self.wait()
        wanted = _by_path(like)
        where = dict(zip(wanted, places or [None] * len(wanted), strict=True))
        folders = [folder for folder in (self._kept, self._local) if folder is not None]
        found = [(step, folder) for folder in folders for step in folder.steps()]
        problems = []
        for step, folder in sorted(found, key=lambda pair: pair[0], reverse=True):
            try:
                about = folder.about(step)
                folder.check(step)
            except _Damaged as damaged:
                problems.append(self._set_aside(folder, step, str(damaged)))
                continue
            _check_same(about["arrays"], wanted, folder.path / str(step))
            try:
                arrays = folder.load(step, wanted, where)
            except _Damaged as damaged:
                problems.append(self._set_aside(folder, step, str(damaged)))
                continue
            leaves = [NamedArray(arrays[path], leaf.dims) for path, leaf in wanted.items()]
            state = jax.tree.unflatten(_structure(like), leaves)
            path = folder.path / str(step)
            return Restored(step, state, about["position"], about["config"], path)
        if problems:
            raise ValueError(
                "\n  ".join(
                    [
                        "every checkpoint is damaged; start anew in another workdir, or put a copy "
                        "back",
                        *problems,
                    ]
                )
            )
        return None

    def _set_aside(self, folder: _Folder, step: int, reason: str) -> str:
        kept = folder.set_aside(step)
        told = f"checkpoint {folder.path / str(step)} is damaged: {reason}; kept as {kept}"
        warnings.warn(told, CheckpointWarning, stacklevel=3)
        return told

    def wait(self) -> None:
        """Returns when all that has been saved is on disk."""
        for folder in (self._kept, self._local):
            if folder is not None:
                folder.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)


class _Damaged(Exception):
    """A checkpoint cannot be read, or is not what was saved."""


class _Folder:
    """The checkpoints in one folder, each in one of its own, named by its step."""

    def __init__(self, path: Path, keep: int, keep_best: int) -> None:
        import orbax.checkpoint as ocp
        from orbax.checkpoint.checkpoint_managers import AnyPreservationPolicy, BestN, LatestN

        self.path = path.absolute()
        best = BestN(
            get_metric_fn=_eval_loss,
            reverse=True,
            n=keep_best,
            keep_checkpoints_without_metrics=False,
        )
        kept = [LatestN(n=keep), *([best] if keep_best else [])]
        options = ocp.CheckpointManagerOptions(preservation_policy=AnyPreservationPolicy(kept))
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._manager = ocp.CheckpointManager(self.path, options=options)
        except OSError as error:
            raise ValueError(
                f"cannot keep checkpoints in {self.path}: {error.strerror}. Choose another folder"
            ) from error
        self._seals = Seals(self.path)

    def steps(self) -> Sequence[int]:
        return list(self._manager.all_steps())

    def save(
        self, step: int, arrays: Mapping[str, Any], about: Any, eval_loss: float | None
    ) -> None:
        import orbax.checkpoint as ocp

        items = ocp.args.Composite(
            state=ocp.args.StandardSave(nested(arrays)), about=ocp.args.JsonSave(about)
        )
        metrics = None if eval_loss is None else {"eval_loss": eval_loss}
        self.wait()  # a checkpoint is sealed before it can be deleted for this one
        with self._told():
            self._manager.save(step, args=items, metrics=metrics, force=True)
        self._seals.add(step)

    def about(self, step: int) -> Any:
        """Returns what stands beside the arrays of a checkpoint."""
        try:
            text = (self.path / str(step) / "about" / "metadata").read_text()
            about = json.loads(text)
            return {key: about[key] for key in ("arrays", "position", "config")}
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise _Damaged(f"its description cannot be read ({error})") from error

    def check(self, step: int) -> None:
        """Raises `_Damaged`, in every process, if a file is not as it was written."""
        found = damage(self.path / str(step))
        if not everywhere(found is None):
            raise _Damaged(found or "another process has found a damaged file")

    def load(self, step: int, like: Mapping[str, Any], places: Mapping[str, Any]) -> dict[str, Any]:
        import orbax.checkpoint as ocp

        wanted = {path: _abstract(leaf, places[path]) for path, leaf in like.items()}
        restore = ocp.args.Composite(state=ocp.args.StandardRestore(nested(wanted)))
        problem, tree = None, None
        try:
            tree = self._manager.restore(step, args=restore)["state"]
        except Exception as error:  # Orbax's own, and those of its storage, are of many kinds
            problem = str(error).splitlines()[0][:200]
        if not everywhere(problem is None):
            raise _Damaged(problem or "another process could not read it")
        return {path: _at(tree, path) for path in like}

    def set_aside(self, step: int) -> Path:
        """Renames a damaged checkpoint, so that another can be saved for its step."""
        self._manager.wait_until_finished()
        source = self.path / str(step)
        target = self.path / f"damaged.{step}"
        number = 1
        while target.exists():
            number += 1
            target = self.path / f"damaged.{step}.{number}"
        if jax.process_index() == 0:
            source.rename(target)
        everywhere(True)  # no process looks before it is done
        self._manager.reload()
        return target

    def wait(self) -> None:
        with self._told():
            self._manager.wait_until_finished()
        self._seals.wait()

    @contextmanager
    def _told(self) -> Iterator[None]:
        """Tells what goes wrong with a disk, at once or behind the steps since, as one line."""
        try:
            yield
        except Exception as error:
            cause = _system_error(error)
            if cause is None:
                raise
            raise ValueError(
                f"cannot save a checkpoint in {self.path}: {cause}. Those before it are complete"
            ) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        if error[0] is not None and jax.process_count() > 1:
            return  # the others may be gone, who would be waited for
        try:
            self.wait()
        finally:
            self._seals.wait()
            self._manager.close()


_SYSTEM = {code: os.strerror(code) for code in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)}


def _system_error(error: BaseException | None) -> str | None:
    """Returns what the system says of a failure, if it comes from there."""
    while error is not None:
        if isinstance(error, OSError) and error.strerror:
            return error.strerror
        for text in _SYSTEM.values():
            if text in str(error):  # storage libraries tell it in words
                return text
        error = error.__cause__ or error.__context__
    return None


def _eval_loss(metrics: Any) -> float:
    return float(metrics["eval_loss"])


def _by_path(tree: Any) -> dict[str, Any]:
    keyed = jax.tree_util.tree_flatten_with_path(tree, is_leaf=_is_leaf)[0]
    return {path_of(keys): leaf for keys, leaf in keyed}


def _structure(tree: Any) -> Any:
    return jax.tree.structure(tree, is_leaf=_is_leaf)


def _is_leaf(value: Any) -> bool:
    return isinstance(value, NamedArray | Spec)


def _told(array: Any) -> dict[str, Any]:
    return {
        "dims": [[dim.name, dim.size] for dim in array.dims],
        "dtype": np.dtype(array.dtype).name,
    }


def _whole(array: NamedArray) -> Any:
    """Returns an array without pads, where it is; of other backends than JAX's, on the host."""
    return array.unpadded() if isinstance(array.data, jax.Array) else np.asarray(array)


def _abstract(leaf: Any, place: Any) -> Any:
    sizes, dtype = leaf.dims.sizes, np.dtype(leaf.dtype)
    if place is None:
        return np.broadcast_to(np.zeros((), dtype), sizes)
    return jax.ShapeDtypeStruct(sizes, dtype, sharding=place)


def nested(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """Returns leaves by path as dicts within dicts."""
    tree: dict[str, Any] = {}
    for path, leaf in leaves.items():
        *parents, name = path.split("/")
        inner = tree
        for parent in parents:
            inner = inner.setdefault(parent, {})
        inner[name] = leaf
    return tree


def _at(tree: Any, path: str) -> Any:
    for name in path.split("/"):
        tree = tree[name]
    return tree


def _check_same(saved: Mapping[str, Any], wanted: Mapping[str, Any], folder: Path) -> None:
    """Raises ValueError with every difference between what was saved and what is wanted."""
    now = {path: _told(leaf) for path, leaf in wanted.items()}
    told = [f"{path}: not in the checkpoint" for path in now if path not in saved]
    told += [f"{path}: only in the checkpoint" for path in saved if path not in now]
    told += [
        f"{path}: {_shown(saved[path])} in the checkpoint, {_shown(now[path])} here"
        for path in now
        if path in saved and saved[path] != now[path]
    ]
    if told:
        rest = [f"... and {len(told) - _MOST} more"] if len(told) > _MOST else []
        raise ValueError(
            "\n  ".join([f"checkpoint {folder} is of another model", *told[:_MOST], *rest])
        )


def _shown(about: Mapping[str, Any]) -> str:
    dims = ", ".join(f"{name}={size}" for name, size in about["dims"])
    return f"{short(np.dtype(about['dtype']))}[{dims}]"
