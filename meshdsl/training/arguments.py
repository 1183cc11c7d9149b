"""Whether the arguments of `train` are of the kinds that it takes: all that are not, in one error.

What a number or a pattern must be beyond its kind is checked where it is used.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from meshdsl.tensors.dims import did_you_mean
from meshdsl.training.batch_ramp import BatchRamp
from meshdsl.training.checkpointing.saving import Saving
from meshdsl.training.loss_scaling import LossScaling
from meshdsl.training.reporting.profiling import ProfiledSteps
from meshdsl.training.stopping import Stops

NONFINITE = ("stop", "skip")  # what a step does that is not finite

_NUMBERS = (
    "steps",
    "seed",
    "microbatches",
    "steps_per_call",
    "log_every",
    "eval_every",
    "tokens_per_batch",
)
_FUNCTIONS = {
    "init": "a function from a key to the parameters",
    "loss": "a function of the parameters and a batch",
    "update": "a function of the parameters and what the loss adds",
}
_CLASSES = {
    "loss_scaling": (LossScaling, "LossScaling() of meshdsl.training.loss_scaling"),
    "batch_ramp": (BatchRamp, "BatchRamp(...) of meshdsl.training.batch_ramp"),
    "saving": (Saving, "Saving(every=500) of meshdsl.training"),
    "stops": (Stops, "Stops(...) of meshdsl.training.stopping"),
    "profile": (ProfiledSteps, "ProfiledSteps(...) of meshdsl.training.reporting.profiling"),
}
_PATHS = ("workdir", "init_from")
_OPTIONAL = ("update", "eval_every", "tokens_per_batch", *_CLASSES, *_PATHS)


def check_arguments(given: Mapping[str, Any]) -> None:
    """Raises ValueError for every argument of `train` that is of another kind.

    `check_arguments({"steps": "ten"})`.

    Args:
        given: the arguments by their names.
    """
    present = {n: v for n, v in given.items() if v is not None or n not in _OPTIONAL}
    problems = [text for name, value in present.items() if (text := _problem(name, value))]
    if problems:
        raise ValueError("train: " + "; ".join(problems))


def check_nonfinite(word: Any) -> None:
    """Raises ValueError unless `word` says what a step does that is not finite."""
    if word not in NONFINITE:
        hint = did_you_mean(str(word), NONFINITE)
        raise ValueError(f"nonfinite is one of {', '.join(NONFINITE)}, not {word!r}{hint}")


def _problem(name: str, value: Any) -> str:
    """Returns what is wrong with the kind of an argument, or nothing."""
    if name in _NUMBERS:
        whole = hasattr(value, "__index__") and not isinstance(value, bool)
        return "" if whole else f"{name} is a whole number, not {value!r}"
    if name in _FUNCTIONS:
        return "" if callable(value) else f"{name} is {_FUNCTIONS[name]}, not {value!r}"
    if name in _PATHS and not isinstance(value, str | os.PathLike):
        return f"{name} is a path, not {value!r}"
    if name in _CLASSES and not isinstance(value, _CLASSES[name][0]):
        return f"{name} is {_CLASSES[name][1]}, not {value!r}"
    if name == "batch_dims" and not isinstance(value, Mapping | None):
        return f"batch_dims are the dims of each entry, as in {{'image': ['batch']}}, not {value!r}"
    if name == "batch_dim" and not isinstance(value, str):
        return f"batch_dim is the name of a dim, not {value!r}"
    if name == "nonfinite":
        try:
            check_nonfinite(value)
        except ValueError as error:
            return str(error)
    return ""
