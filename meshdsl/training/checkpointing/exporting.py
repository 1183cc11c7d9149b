"""The parameters of a checkpoint as safetensors, on any machine: no mesh, no model, no optimizer.

The checkpoint is only read, also while a run goes on that writes others beside it.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from meshdsl.tensors.dims import Dimension
from meshdsl.tensors.named_array import Spec, spec
from meshdsl.training.checkpointing.checkpoints import CheckpointWarning
from meshdsl.training.checkpointing.saving import FOLDER
from meshdsl.training.checkpointing.seals import damage
from meshdsl.training.checkpointing.shared_checkpoints import described, nested
from meshdsl.training.checkpointing.weight_files import check_free
from meshdsl.training.checkpointing.weights import SHARD, write_weights

_PARAMS = "params"


@dataclass(frozen=True)
class Exported:
    """The result of an export.

    Attributes:
        step: the checkpoint's step.
        count: the number of elements of all parameters.
        files: the written files.
    """

    step: int
    count: int
    files: tuple[Path, ...]


def export(
    workdir: str | os.PathLike[str],
    out: str | os.PathLike[str],
    step: int | None = None,
    dtype: Any = None,
    max_shard_size: int = SHARD,
) -> Exported:
    """Writes the parameters of a run's checkpoint: `export("runs/first", "weights")`.

    Args:
        workdir: the run's folder.
        out, dtype, max_shard_size: as in `save_weights`.
        step: the checkpoint's step. None: the latest undamaged one.

    Raises:
        ValueError: there is no such checkpoint, or it is damaged; or the files cannot be written.
    """
    target = Path(out).absolute()
    check_free(target)
    folder = _undamaged(Path(workdir).absolute() / FOLDER, step)
    specs = _specs(folder)

    def fetch(names: Sequence[str]) -> dict[str, np.ndarray]:
        return _read(folder, {name: specs[name] for name in names})

    number = int(folder.name)
    files = write_weights(target, specs, fetch, dtype, max_shard_size, number)
    return Exported(number, sum(each.dims.volume for each in specs.values()), tuple(files))


def _undamaged(checkpoints: Path, step: int | None) -> Path:
    """Returns the folder of a checkpoint that is not damaged."""
    steps = sorted(int(path.name) for path in checkpoints.glob("*") if path.name.isdigit())
    if not steps:
        raise ValueError(f"{checkpoints} has no checkpoint")
    if step is not None and step not in steps:
        listed = ", ".join(map(str, steps))
        raise ValueError(f"{checkpoints} has no checkpoint of step {step}; it has {listed}")
    problems: list[str] = []
    for number in reversed(steps) if step is None else [step]:
        folder = checkpoints / str(number)
        try:
            reason = damage(folder)
        except OSError as error:
            raise ValueError(f"cannot read {error.filename}: {error.strerror}") from error
        if reason is None:
            if problems:
                warnings.warn("; ".join(problems), CheckpointWarning, stacklevel=3)
            return folder
        problems.append(f"checkpoint {folder} is damaged: {reason}")
    raise ValueError("\n  ".join(problems))


def _specs(folder: Path) -> dict[str, Spec]:
    """Returns the parameters in a checkpoint."""
    try:
        arrays = described(folder)["arrays"]
        return {
            path.removeprefix(f"{_PARAMS}/"): spec(
                [Dimension(name, size) for name, size in array["dims"]], array["dtype"]
            )
            for path, array in arrays.items()
            if path.startswith(f"{_PARAMS}/")
        }
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"the description of {folder} cannot be read ({error})") from error


def _read(folder: Path, specs: dict[str, Spec]) -> dict[str, np.ndarray]:
    """Returns some of the parameters in a checkpoint; nothing else of it is read."""
    import orbax.checkpoint as ocp

    wanted = {
        f"{_PARAMS}/{n}": np.broadcast_to(np.zeros((), s.dtype), s.dims.sizes)
        for n, s in specs.items()
    }
    how = {path: ocp.RestoreArgs(restore_type=np.ndarray) for path in wanted}
    args = ocp.args.PyTreeRestore(nested(wanted), restore_args=nested(how), partial_restore=True)
    try:
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
            tree = reader.restore(folder / "state", args=args)
    except Exception as error:  # Orbax's own, and those of its storage, are of many kinds
        reason = str(error).splitlines()[0][:200]
        raise ValueError(
            f"cannot read {folder}: {reason}. If a run goes on there, it may have deleted it"
        ) from error
    params = {}
    for name in specs:
        leaf = tree[_PARAMS]
        for part in name.split("/"):
            leaf = leaf[part]
        params[name] = np.asarray(leaf)
    return params
