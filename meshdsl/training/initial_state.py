"""The start of a run: a checkpoint, or weights in files with a fresh optimizer state."""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass, replace
from typing import Any

from meshdsl.layouts.layout import Layout
from meshdsl.layouts.validate import LayoutWarning, ScopeWarning
from meshdsl.ops.random import KEY, key
from meshdsl.tensors.named_array import spec
from meshdsl.tensors.tensor import Tensor
from meshdsl.training.checkpointing.checkpoints import Restored
from meshdsl.training.checkpointing.weights import Weights
from meshdsl.training.data.feeding import Feed
from meshdsl.training.processes.joining import together
from meshdsl.training.programs import Programs, places
from meshdsl.training.state import TrainState, by_path, tree_like
from meshdsl.training.trainable import Trainable, merged

_MOST = 10  # the most parameters in a message


@dataclass(frozen=True)
class Beginning:
    """The state that a run starts from.

    Attributes:
        step: how many steps have been taken.
        evaluated: whether the last evaluation is done, if these are all steps of the run.
        reports: how many times metrics have been reported; None: unknown.
    """

    state: TrainState
    step: int = 0
    evaluated: bool = True
    reports: int | None = 0


def _going_on(restored: Restored, feed: Feed, steps_per_call: int) -> Beginning:
    """Returns the start of a run that a checkpoint has; moves the data to the same step.

    Raises:
        ValueError: `steps_per_call` does not divide its step, or it was saved with other data.
    """
    if restored.step % steps_per_call:
        raise ValueError(
            f"the run goes on from step {restored.step}, which calls of {steps_per_call} steps do "
            "not lead to: take a number for steps_per_call that divides it (1 does)"
        )
    feed.seek(restored.step, restored.position["feed"])
    position = restored.position
    return Beginning(restored.state, restored.step, position["evaluated"], position.get("reports"))


@dataclass(frozen=True)
class GivenWeights:
    """Weights in files that a run starts from, and the parameters that they leave out.

    Attributes:
        missing: paths of parameters that are trained and that the files lack; they are initialised.
    """

    weights: Weights
    missing: frozenset[str]

    def __str__(self) -> str:
        source = f"starting from the weights {self.weights.files.path}"
        if not self.missing:
            return source
        names = sorted(self.missing)
        rest = f" and {len(names) - _MOST} more" if len(names) > _MOST else ""
        return f"{source}; initialised, since it has none: {', '.join(names[:_MOST])}{rest}"


def checked_weights(
    path: str | os.PathLike[str], params: Any, trainable: Trainable | None
) -> GivenWeights:
    """Returns the weights in a file or a folder; each process checks that they fit the model.

    Raises:
        ValueError: they cannot be read, are of another model, or lack parameters that are not
            trained.
    """
    with together():
        weights = Weights(path)
        missing = weights.check(params, trainable)
    return GivenWeights(weights, missing)


def first_of(
    restored: Restored | None,
    weights: GivenWeights | None,
    programs: Programs,
    feed: Feed,
    steps_per_call: int,
) -> Beginning:
    """Returns what a run starts from: a checkpoint, else given weights, else those of `init`.

    Raises:
        ValueError: the run cannot go on from the checkpoint, or the weights cannot be read.
    """
    if restored is not None:
        return _going_on(restored, feed, steps_per_call)
    if weights is not None:
        return Beginning(_state_of_weights(weights, programs))
    return Beginning(programs.first_state())


def _state_of_weights(initial: GivenWeights, programs: Programs) -> TrainState:
    """Returns the state that a run of these programs starts from.

    Parameters that the files lack get the values that `init` gives for the seed. All others are
    only read: `init` does not compute them.

    Raises:
        ValueError: the weights cannot be read.
    """
    recipe, like = programs.recipe, programs.state
    leaves = [
        None if path in initial.missing else leaf for path, leaf in by_path(like.params).items()
    ]
    stored = tree_like(like.params, leaves)

    def create_state(state: dict[str, Any], key: Tensor) -> dict[str, TrainState]:
        def init(key: Tensor) -> Any:
            params = state["params"]
            return merged(params, recipe.init(key)) if initial.missing else params

        return {"state": replace(recipe, init=init).create_state()(key)}  # the paths of the step's

    names = {name for leaf in by_path(like).values() for name in leaf.dims.names}
    layout = Layout(tuple(rule for rule in programs.step.layout.rules if rule.dim in names))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", LayoutWarning)  # lowering the step has warned already
        warnings.simplefilter("ignore", ScopeWarning)
        creation = replace(programs.place, layout=layout).jit(create_state, donate="state")
        compiled = creation.lower({"params": stored}, spec([KEY], "uint32")).compile()
    with together():
        params = initial.weights.load(stored, places(compiled, stored))
    state: TrainState = compiled({"params": params}, key(recipe.seed))["state"]
    return state
