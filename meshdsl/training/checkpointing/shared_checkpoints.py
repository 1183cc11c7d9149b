"""The checkpoints in a folder that all processes share, written by Orbax."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Self

import jax
import numpy as np

from meshdsl.training.checkpointing.disk_errors import Writing, dropped_logs
from meshdsl.training.checkpointing.read_errors import entries, sorted_errors
from meshdsl.training.checkpointing.seals import Damaged, Seals, damage
from meshdsl.training.processes.joining import everywhere

_ABOUT = "about"  # what stands beside the arrays of a checkpoint, and its folder there


class SharedFolder:
    """The checkpoints in one folder, each in a folder named by its step.

    Only one run opens it at a time. It deletes the unfinished checkpoint of a killed run.
    """

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
        policies = [LatestN(n=keep), *([best] if keep_best else [])]
        options = ocp.CheckpointManagerOptions(
            preservation_policy=AnyPreservationPolicy(policies),
            best_fn=_eval_loss,  # without one, Orbax writes no losses, and a resumed run has none
            best_mode="min",
            cleanup_tmp_directories=True,
        )
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._manager = ocp.CheckpointManager(self.path, options=options)
        except OSError as error:
            raise ValueError(
                f"cannot keep checkpoints in {self.path}: {error.strerror}. Choose another folder"
            ) from error
        self._logs = ExitStack()
        self._writing = Writing(self.path, self._logs.enter_context(dropped_logs()))
        self._seals = Seals(self.path)

    def steps(self) -> Sequence[int]:
        return list(self._manager.all_steps())

    @property
    def save_seconds(self) -> float | None:
        """How long the last checkpoint took until it was complete; None: there was none."""
        return self._seals.seconds

    def save(
        self, step: int, arrays: Mapping[str, Any], about: Any, eval_loss: float | None
    ) -> None:
        import orbax.checkpoint as ocp

        items = ocp.args.Composite(
            state=ocp.args.StandardSave(nested(arrays)), **{_ABOUT: ocp.args.JsonSave(about)}
        )
        metrics = None if eval_loss is None else {"eval_loss": eval_loss}
        self.wait()  # a checkpoint is sealed before it can be deleted for this one
        began = time.monotonic()
        self._writing.begins()
        with self._writing.reported_to_all():
            self._manager.save(step, args=items, metrics=metrics, force=True)
        self._seals.add(step, began)

    def about(self, step: int) -> Any:
        """Returns the description of a checkpoint; all processes must call this.

        Raises:
            Damaged: in every process, if a file is not as it was written.
            ValueError: in every process, if one cannot be read.
        """
        checkpoint = self.path / str(step)
        with sorted_errors(checkpoint):
            about = entries(partial(described, checkpoint), ("arrays", "position", "config"))
            if problem := damage(checkpoint):
                raise Damaged(problem)
        return about

    def load(self, step: int, like: Mapping[str, Any], places: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the arrays of a checkpoint; all processes must call this; raises as `about`."""
        import orbax.checkpoint as ocp

        wanted = {path: _abstract(leaf, places[path]) for path, leaf in like.items()}
        restore = ocp.args.Composite(state=ocp.args.StandardRestore(nested(wanted)))
        with sorted_errors(self.path / str(step)):
            tree = self._manager.restore(step, args=restore)["state"]
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
        self._writing.finish(self._manager.wait_until_finished)
        self._seals.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        with self._logs:
            if error[0] is not None and jax.process_count() > 1:
                return  # the others may be gone, who would be waited for
            try:
                self.wait()
            finally:
                self._seals.wait()
                self._manager.close()


def described(checkpoint: Path) -> Any:
    """Returns the description of a checkpoint, without reading its arrays.

    It waits for no other process and needs no devices of JAX: early checks use it.

    Raises:
        FileNotFoundError: the checkpoint has none.
        OSError, ValueError: it cannot be read.
    """
    # Orbax's JsonCheckpointHandler reports every file that it cannot open as missing. A checkpoint
    # on a disk that fails for a moment would then be set aside as damaged.
    return json.loads((checkpoint / _ABOUT / "metadata").read_text())


def _eval_loss(metrics: Any) -> float:
    return float(metrics["eval_loss"])


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
