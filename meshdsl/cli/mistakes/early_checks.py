"""Checks of a run before its data is read and its step is compiled, so that mistakes show at once.

The run itself checks all of this again, with what it knows by then. These checks write nothing,
read no array, and import little.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from absl import flags

from meshdsl.cli.job import Job
from meshdsl.cli.mistakes.problems import Problems
from meshdsl.optim.by_name import DEFAULT
from meshdsl.training.checkpointing.checkpoints import check_same
from meshdsl.training.checkpointing.saving import FOLDER, begun, differences, refusal
from meshdsl.training.checkpointing.shared_checkpoints import described
from meshdsl.training.checks import misfit_of_steps
from meshdsl.training.state import by_path, spec_of

# What settings mean that a checkpoint lacks: the optimizer by its name, and later flags.
DEFAULTS = {"optimizer": DEFAULT, "begin_documents": "False"}
_DATA = "the data"  # the setting that is known only once the data is read


def check(
    values: flags.FlagValues, job: Job, settings: Mapping[str, str], problems: Problems
) -> None:
    """Adds what is wrong with steps, devices, the workdir, its checkpoint and the weights.

    Args:
        settings: the job's settings, as checkpoints store them.
    """
    _check_steps(values, problems)
    if job.mesh is not None and job.backend.startswith("jax"):
        from meshdsl.lowering.backends.jax.executable import device_mesh

        with problems.caught("--mesh_shape"):
            device_mesh(job.mesh)
    going_on = bool(values.workdir) and begun(values.workdir)
    if values.workdir:
        with problems.caught("--workdir"):
            _check_writable(Path(values.workdir))
    if going_on and not values.resume:
        problems.add(
            f"--noresume: {Path(values.workdir) / FOLDER} has checkpoints of an earlier run, which "
            "this one is not to go on from; choose another --workdir"
        )
    elif going_on:
        _check_checkpoint(Path(values.workdir) / FOLDER, job, settings, values.override, problems)
    if values.init_from is not None and not going_on:
        from meshdsl.training.checkpointing.weights import Weights

        with problems.caught("--init_from"):
            params = spec_of(job.recipe.create_state()).params
            Weights(values.init_from).check(params, job.recipe.trainable)


def _check_steps(values: flags.FlagValues, problems: Problems) -> None:
    names = "steps log_every eval_every checkpoint_every local_every replica_check_every".split()
    at_once = values.steps_per_call
    if not isinstance(at_once, int) or at_once == 1:
        return
    numbers = {name: values[name].value for name in names}
    numbers = {name: n for name, n in numbers.items() if isinstance(n, int)}  # others are reported
    if problem := misfit_of_steps(at_once, numbers, "--"):
        problems.add(problem)


def _check_writable(folder: Path) -> None:
    """Raises ValueError if nothing can be written to a folder, which may not be there yet."""
    folder = folder.absolute()
    there = next(path for path in (folder, *folder.parents) if path.exists())
    if not there.is_dir():
        raise ValueError(f"{there} is a file, not a folder; choose another")
    if not os.access(there, os.W_OK | os.X_OK):
        raise ValueError(f"{there} cannot be written to; choose another")


def _check_checkpoint(
    folder: Path, job: Job, settings: Mapping[str, str], override: bool, problems: Problems
) -> None:
    """Compares the settings with those of the latest checkpoint; if they fit, the arrays.

    A checkpoint whose description cannot be read is left to the run, which reports it.
    """
    latest = max((path for path in folder.glob("*") if path.name.isdigit()), key=_step)
    try:
        about = described(latest)
        config, arrays = dict(about["config"]), dict(about["arrays"])
    except (OSError, ValueError, KeyError, TypeError):
        return
    config.pop(_DATA, None)
    changes = [] if override else differences(config, settings, DEFAULTS)
    if changes:
        problems.add(refusal(latest, changes))
        return
    with problems.caught("--workdir"):
        check_same(arrays, by_path(spec_of(job.recipe.create_state())), latest)


def _step(path: Path) -> int:
    return int(path.name)
