"""Training: a run, from its data to its results: `from meshdsl.training import train`.

`loop.train` is the entry point. A `recipe` describes the model and its `step` (`microbatches`,
`loss_scaling`, `nonfinite`, `step_metrics`) on a `state`. `programs` compiles what devices run. A
`run` takes the steps until something stops it (`stopping`). Users choose in records: `Recipe`,
`Data`, `Evaluation`, `Reporting`, `Saving`, `Stops` and `Health`, whose fields are `settings`.

* `data/` makes batches from files, and feeds a run with them.
* `checkpointing/` saves checkpoints, with checksums, and writes weights as files.
* `processes/` connects the processes of a job on many hosts; they agree, and watch each other.
* `health/` finds faults of devices and processes that raise no error.
* `reporting/` writes metrics and profiles, and shows progress.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from meshdsl.training.batch_ramp import BatchRamp
    from meshdsl.training.checkpointing.saving import Saving
    from meshdsl.training.checkpointing.weights import load_weights, save_weights
    from meshdsl.training.data.feeding import Data
    from meshdsl.training.evaluation import Evaluation
    from meshdsl.training.health.settings import Health
    from meshdsl.training.loop import train
    from meshdsl.training.loss_scaling import LossScaling
    from meshdsl.training.nonfinite import NotFinite
    from meshdsl.training.processes.joining import joined
    from meshdsl.training.recipe import Recipe
    from meshdsl.training.reporting.profiling import ProfiledSteps
    from meshdsl.training.reporting.reports import Reporting
    from meshdsl.training.state import spec_of
    from meshdsl.training.stopping import Stops

__all__ = [
    "BatchRamp",
    "Data",
    "Evaluation",
    "Health",
    "LossScaling",
    "NotFinite",
    "ProfiledSteps",
    "Recipe",
    "Reporting",
    "Saving",
    "Stops",
    "joined",
    "load_weights",
    "save_weights",
    "spec_of",
    "train",
]

# Checkpoints bring Orbax along, which takes long to import: each name comes when it is used.
_WHERE = {
    "BatchRamp": "batch_ramp",
    "Data": "data.feeding",
    "Evaluation": "evaluation",
    "Health": "health.settings",
    "LossScaling": "loss_scaling",
    "NotFinite": "nonfinite",
    "ProfiledSteps": "reporting.profiling",
    "Recipe": "recipe",
    "Reporting": "reporting.reports",
    "Saving": "checkpointing.saving",
    "Stops": "stopping",
    "joined": "processes.joining",
    "load_weights": "checkpointing.weights",
    "save_weights": "checkpointing.weights",
    "spec_of": "state",
    "train": "loop",
}


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_WHERE[name]}"), name)
