"""Checks of a run's numbers of steps, and of the folder that it saves to."""

from __future__ import annotations

import os
from collections.abc import Mapping

import jax

from meshdsl.training.checkpointing.saving import Saving
from meshdsl.training.evaluation import Evaluation
from meshdsl.training.health.settings import Health
from meshdsl.training.reporting.reports import Reporting
from meshdsl.training.stopping import Stops


def check_workdir(
    workdir: str | os.PathLike[str] | None,
    reporting: Reporting,
    saving: Saving | None,
    stops: Stops,
) -> None:
    """Raises ValueError if there is something to write, and no folder to write it to."""
    if reporting.profile is not None and workdir is None:
        raise ValueError("a profile needs a workdir, where it is written")
    if saving is not None and workdir is None:
        raise ValueError("saving needs a workdir, where checkpoints are kept")
    if stops.grace is not None and saving is None:
        raise ValueError("grace is the time to save in, which needs `saving` and a workdir")


def check_steps_per_call(
    steps_per_call: int,
    steps: int,
    evaluation: Evaluation,
    reporting: Reporting,
    saving: Saving | None,
    health: Health,
) -> None:
    """Raises ValueError if `steps_per_call` does not divide the other numbers of steps."""
    numbers = {
        "steps": steps,
        "log_every": reporting.log_every,
        "eval_every": evaluation.eval_every,
        "checkpoint_every": None if saving is None else saving.every,
        "local_every": None if saving is None else saving.local_every,
        "replica_check_every": health.replica_check_every,
    }
    if problem := misfit_of_steps(steps_per_call, numbers):
        raise ValueError(problem)


def check_saves_together(processes: int, saving: Saving | None) -> None:
    """Raises ValueError if several processes would save without knowing of each other."""
    if saving is not None and processes not in (1, jax.process_count()):
        raise ValueError(
            f"the {processes} processes of TF_CONFIG cannot save checkpoints together: leave out "
            "--workdir (`saving` in Python), or run them on JAX (--backend=jax --coordinator=...)"
        )


def check_health(health: Health, backend: str) -> None:
    """Raises ValueError if devices are to be compared that are not those of JAX."""
    if backend.startswith("jax"):
        return
    for name in ("replica_check_every", "straggler_factor"):
        if getattr(health, name) is not None:
            raise ValueError(
                f"{name} compares the devices of JAX; backend {backend} has none. Leave it out, or "
                "take backend jax"
            )


def misfit_of_steps(at_once: int, numbers: Mapping[str, int | None], mark: str = "") -> str | None:
    """Returns which numbers of steps `steps_per_call` does not divide, or None if it divides all.

    Args:
        numbers: numbers of steps by their names; None stands for one that is not set.
        mark: a prefix of the names, such as "--" of flags.
    """
    wrong = [f"{mark}{name}={n}" for name, n in numbers.items() if n is not None and n % at_once]
    if not wrong:
        return None
    return (
        f"{mark}steps_per_call={at_once}: so many steps are done at once, which do not divide "
        f"{', '.join(wrong)}"
    )
