"""Steps: a recipe's training step, with the variants that a search may choose from."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from meshdsl.lowering.options import Options
from meshdsl.running.jit import jit
from meshdsl.search.plans import Step
from meshdsl.search.space import Variant
from meshdsl.tensors.named_array import Spec
from meshdsl.tracing.graph import Graph
from meshdsl.training.microbatches import check_microbatches
from meshdsl.training.recipe import Recipe
from meshdsl.training.state import spec_of

MOST_PARTS = 256
_STATE = "state"


def recipe_step(
    recipe: Recipe,
    batch: Mapping[str, Spec],
    microbatches: Sequence[int] | None = None,
    remats: Sequence[str] = ("",),
    with_remat: Callable[[str], Recipe] | None = None,
    options: Options | None = None,
) -> Step:
    """Returns the training step of a recipe, for a search.

    Args:
        batch: the specs of a batch.
        microbatches: the numbers of microbatches to choose from; None: that of the recipe.
        remats: what the backward pass may recompute; "": what the recipe's loss says.
        with_remat: returns the recipe with another one of `remats`.
    """
    states: dict[str, Any] = {}

    def graph(variant: Variant) -> Graph:
        made = recipe
        if variant.remat:
            assert with_remat is not None
            made = with_remat(variant.remat)
        made = replace(made, microbatches=variant.microbatches)
        if _STATE not in states:  # all variants have the same parameters
            states[_STATE] = spec_of(made.create_state())
        return jit(made.train_step(), donate=_STATE).trace(states[_STATE], batch)

    counts = (recipe.microbatches,) if microbatches is None else tuple(microbatches)
    return Step(graph, _donated, counts, tuple(remats), Options.of(options))


def _donated(graph: Graph) -> list[bool]:
    return [path.startswith(f"{_STATE}/") for path in graph.input_paths]


def parts_of(batch: Mapping[str, Spec], dim: str = "batch") -> tuple[int, ...]:
    """Returns the numbers of microbatches that divide a batch; they are powers of two."""
    counts, count = [1], 2
    while count <= MOST_PARTS:
        try:
            check_microbatches(batch, count, dim)
        except ValueError:
            break
        counts.append(count)
        count *= 2
    return tuple(counts)
