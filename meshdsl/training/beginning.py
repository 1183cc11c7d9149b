"""What a run starts from: a checkpoint, or weights in files with an optimizer's state for them."""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass, replace
from typing import Any

from meshdsl.layouts.layout import Layout
from meshdsl.layouts.validate import LayoutWarning, ScopeWarning
from meshdsl.training.checkpoints import Restored
from meshdsl.training.feeding import Feed
from meshdsl.training.processes import together
from meshdsl.training.programs import Place, Programs, places
from meshdsl.training.recipe import Recipe
from meshdsl.training.state import TrainState, by_path
from meshdsl.training.weights import Weights


@dataclass(frozen=True)
class Beginning:
    """The state that a run starts from.

    Attributes:
        step: how many steps have been taken.
        evaluated: whether evaluations have followed them, if they are all.
        reports: how many times metrics have been reported; None: that is not known.
    """

    state: TrainState
    step: int = 0
    evaluated: bool = True
    reports: int | None = 0


def going_on(found: Restored, feed: Feed, steps_per_call: int) -> Beginning:
    """Returns what a checkpoint held; the data goes to its place.

    Raises:
        ValueError: calls of so many steps do not lead on from it, or it was saved with other data.
    """
    if found.step % steps_per_call:
        raise ValueError(
            f"the run goes on from step {found.step}, which calls of {steps_per_call} steps do not "
            "lead to: take a number for steps_per_call that divides it (1 does)"
        )
    feed.seek(found.step, found.position["feed"])
    position = found.position
    return Beginning(found.state, found.step, position["evaluated"], position.get("reports"))


def checked_weights(path: str | os.PathLike[str], params: Any) -> Weights:
    """Returns the weights in a file or a folder; each process has to find those of the model.

    Raises:
        ValueError: they cannot be read, or are of another model.
    """
    with together():
        weights = Weights(path)
        weights.check(params)
    return weights


def state_of_weights(
    weights: Weights, recipe: Recipe, place: Place, programs: Programs
) -> TrainState:
    """Returns the state that a run of these programs starts from.

    Raises:
        ValueError: the weights cannot be read.
    """
    create, like = replace(recipe, init=lambda params: params).create_state(), programs.state

    def create_state(state: dict[str, Any]) -> dict[str, TrainState]:  # the paths of the step's
        return {"state": create(state["params"])}

    names = {name for leaf in by_path(like).values() for name in leaf.dims.names}
    layout = Layout(tuple(rule for rule in programs.step.layout.rules if rule.dim in names))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", LayoutWarning)  # the step has told it
        warnings.simplefilter("ignore", ScopeWarning)
        creation = replace(place, layout=layout).jit(create_state, donate="state")
        compiled = creation.lower({"params": like.params}).compile()
    with together():
        params = weights.load(like.params, places(compiled, like.params))
    state: TrainState = compiled({"params": params})["state"]
    return state
