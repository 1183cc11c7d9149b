"""Training: a run, from its data to what it leaves: `from meshdsl.training import train`.

A `recipe` says what is trained, made of a `step` (`microbatches`, `loss_scaling`, `nonfinite`,
`step_metrics`) on a `state`; `programs` are what devices run of it. `loop.train` is the way in: a
`run` takes the steps until something stops it (`stopping`).

* `data/` makes batches of files, and feeds a run with them.
* `checkpointing/` is what a run keeps, with checksums, and weights as files.
* `processes/` are those of a job on many hosts: they meet, agree, and look after each other.
* `reporting/` is what a run says of itself while it trains.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from meshdsl.training.checkpointing.saving import Saving
    from meshdsl.training.checkpointing.weights import load_weights, save_weights
    from meshdsl.training.loop import train
    from meshdsl.training.processes.joining import joined

__all__ = ["Saving", "joined", "load_weights", "save_weights", "train"]

# Checkpoints bring Orbax along, which takes long to import: each name comes when it is used.
_WHERE = {
    "Saving": "checkpointing.saving",
    "joined": "processes.joining",
    "load_weights": "checkpointing.weights",
    "save_weights": "checkpointing.weights",
    "train": "loop",
}


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_WHERE[name]}"), name)
