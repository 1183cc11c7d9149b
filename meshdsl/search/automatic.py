"""Automatic: the mesh and layout of `layout="auto"` in Python, for functions and for recipes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from meshdsl.layouts.layout import Layout
from meshdsl.layouts.mesh import Mesh
from meshdsl.lowering.options import Options
from meshdsl.search.plans import Plan, Step
from meshdsl.search.searching import search
from meshdsl.search.steps import recipe_step
from meshdsl.tensors.named_array import Spec
from meshdsl.tracing.graph import Graph
from meshdsl.training.recipe import Recipe


def for_graph(
    graph: Graph,
    donated: Sequence[bool],
    devices: int | Mesh,
    rules: Layout,
    hardware: str,
    options: Options | None,
) -> tuple[Mesh, Layout]:
    """Returns the mesh and layout with which a function is the fastest.

    Args:
        donated: for each input of the graph, whether an output may be written over it.
        devices: their number, or the mesh that the layout is for.
        rules: every layout of the search has these.
        hardware: the hardware that the times are for, unless `options` name one.

    Raises:
        ValueError: nothing fits, or nothing can be split.
    """
    step = Step(lambda variant: graph, lambda graph: donated, options=Options.of(options))
    return _best(step, devices, rules, hardware)


def for_recipe(
    recipe: Recipe,
    batch: Mapping[str, Spec],
    devices: int | Mesh,
    rules: Layout,
    hardware: str,
    options: Options | None,
) -> tuple[Mesh, Layout]:
    """Returns the mesh and layout with which a recipe's step is the fastest: as `for_graph`."""
    return _best(recipe_step(recipe, batch, options=options), devices, rules, hardware)


def _best(step: Step, devices: int | Mesh, rules: Layout, hardware: str) -> tuple[Mesh, Layout]:
    name = step.options.hardware or hardware
    plain = replace(step, options=replace(step.options, hardware=None))
    best: Plan = search(plain, name, devices, rules).best
    return best.program.mesh, best.point.layout
