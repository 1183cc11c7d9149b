"""Pins: what can be wrong with the rules that a user gives to a search."""

from __future__ import annotations

from collections.abc import Callable

from meshdsl.layouts.layout import Layout
from meshdsl.layouts.mesh import Mesh
from meshdsl.lowering.lower import validate
from meshdsl.search.facts import Facts
from meshdsl.search.space import SLICE
from meshdsl.tracing.graph import Graph


def check_pins(
    pinned: Layout, devices: int | Mesh, slices: int, graph: Graph, facts: Callable[[], Facts]
) -> None:
    """Raises ValueError with all that is wrong with some rules.

    Args:
        devices: how many there are, or their mesh.
        slices: among how many slices the search divides the batch.
        graph: that of the step.
        facts: returns those of the step.
    """
    axes = dict.fromkeys(axis for rule in pinned.rules for axis in rule.axes)
    if isinstance(devices, Mesh):
        validate(graph, devices, pinned, mesh_given=True)
        return
    validate(graph, Mesh(tuple((axis, 1) for axis in axes)), pinned, mesh_given=False)
    if slices == 1:
        return
    if SLICE in axes:
        raise ValueError(
            f"the search names the axis across the slices `{SLICE}`, and splits the batch over it: "
            f"name another axis in {pinned}, or give the mesh"
        )
    for rule in pinned.rules:
        if rule.dim in facts().data[:1] and not rule.scope:
            axis, rest = rule.axes[0] if rule.axes else "data", devices // slices
            raise ValueError(
                f"the search divides `{rule.dim}` among the slices, and `{rule}` rules that out: "
                "leave this rule out, or give the mesh, as in "
                f'--mesh_shape="{SLICE}@dcn:{slices},{axis}:{rest}" and `{rule.dim}:{SLICE}+{axis}`'
            )
