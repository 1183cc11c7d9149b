"""Checks the types of the arguments of `train`; one error lists all wrong ones.

Records among them have checked their own settings when they were made.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshdsl.training.checkpointing.saving import Saving
from meshdsl.training.evaluation import Evaluation
from meshdsl.training.health.settings import Health
from meshdsl.training.recipe import Recipe
from meshdsl.training.reporting.reports import Reporting
from meshdsl.training.settings import PATH, Kind, Of, Whole
from meshdsl.training.stopping import Stops

_NEEDED: dict[str, Kind] = {
    "recipe": Of(Recipe, "is Recipe(init, loss, optimizer) of meshdsl.training"),
    "steps": Whole(1),
    "steps_per_call": Whole(1),
}
_OPTIONAL: dict[str, Kind] = {
    "evaluation": Of(Evaluation, "is Evaluation(held_out) of meshdsl.training"),
    "reporting": Of(Reporting, "is Reporting(log_every=100) of meshdsl.training"),
    "saving": Of(Saving, "is Saving(every=500) of meshdsl.training"),
    "stops": Of(Stops, "is Stops(...) of meshdsl.training.stopping"),
    "health": Of(Health, "is Health(...) of meshdsl.training"),
    "workdir": PATH,
}


def check_arguments(given: Mapping[str, Any]) -> None:
    """Raises one ValueError that lists every argument of `train` of a wrong type.

    `check_arguments({"steps": "ten"})`.

    Args:
        given: the arguments by their names.
    """
    kinds = _NEEDED | {
        name: kind for name, kind in _OPTIONAL.items() if given.get(name) is not None
    }
    problems = [kinds[name].problem(name, value) for name, value in given.items() if name in kinds]
    if any(problems):
        raise ValueError("train: " + "; ".join(filter(None, problems)))
