"""What can be seen to be wrong with the numbers of a run, and with where it saves."""

from __future__ import annotations

import os
from collections.abc import Mapping

import jax

from meshdsl.training.checkpointing.saving import Saving
from meshdsl.training.reporting.profiling import ProfiledSteps


def check_numbers(
    steps_per_call: int,
    workdir: str | os.PathLike[str] | None,
    saving: Saving | None,
    profile: ProfiledSteps | None,
    **numbers: int | None,
) -> None:
    """Raises ValueError if numbers do not fit, or there is nowhere to write to."""
    if profile is not None and workdir is None:
        raise ValueError("a profile needs a workdir, where it is written")
    _check_saving(workdir, saving)
    every = {
        "checkpoint_every": None if saving is None else saving.every,
        "local_every": None if saving is None else saving.local_every,
    }
    _check_at_least_one(steps_per_call=steps_per_call, **numbers, **every)
    counted = {name: numbers[name] for name in ("steps", "log_every", "eval_every")}
    if problem := misfit_of_steps(steps_per_call, {**counted, **every}):
        raise ValueError(problem)


def _check_saving(workdir: str | os.PathLike[str] | None, saving: Saving | None) -> None:
    """Raises ValueError if there is something to save without all that it needs."""
    if saving is not None and workdir is None:
        raise ValueError("saving needs a workdir, where checkpoints are kept")
    if saving is not None and (saving.local is None) != (saving.local_every is None):
        raise ValueError("local checkpoints need both a folder and how often they are saved")


def check_saves_together(processes: int, saving: Saving | None) -> None:
    """Raises ValueError if several processes would save without knowing of each other."""
    if saving is not None and processes not in (1, jax.process_count()):
        raise ValueError(
            f"the {processes} processes of TF_CONFIG cannot save checkpoints together: leave out "
            "--workdir (`saving` in Python), or run them on JAX (--backend=jax --coordinator=...)"
        )


def misfit_of_steps(at_once: int, numbers: Mapping[str, int | None], mark: str = "") -> str | None:
    """Returns why numbers of steps do not fit those that are done at once, or None if they do.

    Args:
        numbers: by their names; None is not given.
        mark: stands before the names, such as "--" of flags.
    """
    wrong = [f"{mark}{name}={n}" for name, n in numbers.items() if n is not None and n % at_once]
    if not wrong:
        return None
    return (
        f"{mark}steps_per_call={at_once}: so many steps are done at once, which do not divide "
        f"{', '.join(wrong)}"
    )


def _check_at_least_one(**numbers: int | None) -> None:
    wrong = {name: n for name, n in numbers.items() if n is not None and n < 1}
    if wrong:
        told = [f"{name} must be at least 1, got {n}" for name, n in wrong.items()]
        raise ValueError("; ".join(told))
