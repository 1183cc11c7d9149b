"""The parameters in a checkpoint, or their averages, and the settings of the run that saved it.

The checkpoint is only read, also while a run goes on that writes others beside it. Nothing else of
it is read, such as the optimizer's state.
"""

from __future__ import annotations

import json
import math
import os
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import jax
import numpy as np

from meshdsl.tensors.dims import Dimension
from meshdsl.tensors.dtypes import short
from meshdsl.tensors.named_array import NamedArray, Spec, spec
from meshdsl.training.checkpointing.checkpoints import CheckpointWarning
from meshdsl.training.checkpointing.saving import FOLDER
from meshdsl.training.checkpointing.seals import damage
from meshdsl.training.checkpointing.shared_checkpoints import described, nested
from meshdsl.training.state import by_path, tree_like

Best: TypeAlias = Literal["best"]
BEST: Best = "best"
_PARAMS, _AVERAGES = "params/", "optimizer/ema/params/"
_MOST = 10  # the most differences in a message


@dataclass(frozen=True)
class StoredParams:
    """The parameters in a checkpoint: `StoredParams.of("runs/first")`.

    Attributes:
        folder: the checkpoint's.
        specs: dims and dtypes of the parameters, by path.
        config: the settings of the run, by name, as text; empty for runs without.
        averages: the paths of the parameters whose averages over steps are read in their place.
    """

    folder: Path
    specs: Mapping[str, Spec]
    config: Mapping[str, str]
    averages: frozenset[str] = frozenset()

    @staticmethod
    def of(
        workdir: str | os.PathLike[str], step: int | Best | None = None, ema: bool = False
    ) -> StoredParams:
        """Returns the parameters in a run's checkpoint.

        Args:
            workdir: the run's folder.
            step: the checkpoint's step. None: the latest undamaged one. `best`: of those that were
                saved with an `eval_loss`, the undamaged one with the least.
            ema: whether to read the averages that `optim.Ema` has kept, in the parameters' dtypes.
                Parameters that were not trained have none.

        Raises:
            ValueError: there is no such checkpoint, it is damaged, or it has no averages.
        """
        folder = _undamaged(Path(workdir).absolute() / FOLDER, step)
        try:
            about = described(folder)
            specs = {
                path.removeprefix(_PARAMS): spec(
                    [Dimension(name, size) for name, size in array["dims"]], array["dtype"]
                )
                for path, array in about["arrays"].items()
                if path.startswith(_PARAMS)
            }
            averages = frozenset(path for path in specs if _AVERAGES + path in about["arrays"])
            config = dict(about["config"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(f"the description of {folder} cannot be read ({error})") from error
        if ema and not averages:
            raise ValueError(
                f"{folder} has no averages of parameters: runs with --ema_decay, or with optim.Ema "
                "in Python, save them"
            )
        return StoredParams(folder, specs, config, averages if ema else frozenset())

    @property
    def step(self) -> int:
        return int(self.folder.name)

    def check(self, like: Any) -> None:
        """Compares the parameters with those of a model.

        Args:
            like: a tree of `md.spec`.

        Raises:
            ValueError: they are of another model; the differences are listed.
        """
        wanted = by_path(like)
        problems = [f"{path}: not in the checkpoint" for path in wanted if path not in self.specs]
        problems += [f"{path}: not of the model" for path in self.specs if path not in wanted]
        problems += [
            f"{path}: {_shown(self.specs[path])} in the checkpoint, {_shown(leaf)} in the model"
            for path, leaf in wanted.items()
            if path in self.specs and not _fits(self.specs[path], leaf)
        ]
        if problems:
            rest = [f"... and {len(problems) - _MOST} more"] if len(problems) > _MOST else []
            first = f"checkpoint {self.folder} is of another model"
            raise ValueError("\n  ".join([first, *problems[:_MOST], *rest]))

    def load(self, like: Any, places: Sequence[Any]) -> Any:
        """Returns the parameters as a tree of NamedArrays, each process with its own blocks.

        Args:
            like: as for `check`.
            places: the sharding of each leaf; of those without one, numpy arrays are returned.

        Raises:
            ValueError: they are of another model, or cannot be read.
        """
        self.check(like)
        wanted = by_path(like)
        where = dict(zip(wanted, places, strict=True))
        arrays = self.read(list(wanted), where)
        return tree_like(like, [NamedArray(arrays[n], leaf.dims) for n, leaf in wanted.items()])

    def read(self, names: Sequence[str], places: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Returns some of the parameters, on the host or with the given shardings.

        Raises:
            ValueError: they cannot be read.
        """
        import orbax.checkpoint as ocp

        where = places or {}
        paths = {n: (_AVERAGES if n in self.averages else _PARAMS) + n for n in names}
        wanted = {
            paths[n]: np.broadcast_to(np.zeros((), self.specs[n].dtype), self.specs[n].dims.sizes)
            for n in names
        }
        how: dict[str, Any] = {}
        for name in names:
            place, dtype = where.get(name), self.specs[name].dtype
            if place is None:
                how[paths[name]] = ocp.RestoreArgs(restore_type=np.ndarray, dtype=dtype)
            else:
                how[paths[name]] = ocp.ArrayRestoreArgs(
                    restore_type=jax.Array, sharding=place, dtype=dtype
                )
        args = ocp.args.PyTreeRestore(
            nested(wanted), restore_args=nested(how), partial_restore=True
        )
        try:
            with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
                tree = reader.restore(self.folder / "state", args=args)
        except Exception as error:  # Orbax's own, and those of its storage, are of many kinds
            reason = str(error).splitlines()[0][:200]
            raise ValueError(
                f"cannot read {self.folder}: {reason}. If a run goes on there, it may have "
                "deleted it"
            ) from error
        params = {}
        for name in names:
            leaf = tree
            for part in paths[name].split("/"):
                leaf = leaf[part]
            params[name] = leaf if where.get(name) is not None else np.asarray(leaf)
        return params


def _undamaged(checkpoints: Path, step: int | Best | None) -> Path:
    """Returns the folder of a checkpoint that is not damaged."""
    steps = sorted(int(path.name) for path in checkpoints.glob("*") if path.name.isdigit())
    if not steps:
        raise ValueError(f"{checkpoints} has no checkpoint")
    candidates = [step] if isinstance(step, int) else steps[::-1]
    if step == BEST:
        candidates = _best_first(checkpoints, candidates)
    elif step is not None and step not in steps:
        listed = ", ".join(map(str, steps))
        raise ValueError(f"{checkpoints} has no checkpoint of step {step}; it has {listed}")
    problems: list[str] = []
    for number in candidates:
        folder = checkpoints / str(number)
        try:
            reason = damage(folder)
        except OSError as error:
            raise ValueError(f"cannot read {error.filename}: {error.strerror}") from error
        if reason is None:
            if problems:
                warnings.warn("; ".join(problems), CheckpointWarning, stacklevel=4)
            return folder
        problems.append(f"checkpoint {folder} is damaged: {reason}")
    raise ValueError("\n  ".join(problems))


def _best_first(checkpoints: Path, steps: Sequence[int]) -> list[int]:
    """Returns the steps that have an `eval_loss`, by ascending loss; equal ones keep their order.

    Raises:
        ValueError: none has one.
    """
    losses = {}
    for step in steps:
        with suppress(OSError, ValueError, KeyError, TypeError):  # there is none
            loss = float(json.loads(_metrics_of(checkpoints / str(step)).read_text())["eval_loss"])
            losses[step] = loss if math.isfinite(loss) else math.inf
    if not losses:
        raise ValueError(
            f"no checkpoint in {checkpoints} was saved with an eval_loss: a run has one in those "
            "steps that it evaluates, so let --checkpoint_every be a multiple of --eval_every"
        )
    return sorted(losses, key=losses.__getitem__)


def _metrics_of(checkpoint: Path) -> Path:
    """Returns the file of Orbax's that has the metrics of a checkpoint."""
    return checkpoint / "metrics" / "metrics"


def _fits(stored: Spec, leaf: Spec) -> bool:
    return stored.dims == leaf.dims and stored.dtype == leaf.dtype


def _shown(leaf: Spec) -> str:
    sizes = ", ".join(f"{dim.name}={dim.size}" for dim in leaf.dims)
    return f"{short(np.dtype(leaf.dtype))}[{sizes}]"
