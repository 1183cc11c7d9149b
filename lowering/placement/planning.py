"""Planning: every tensor of a graph gets its layout, and every operation its plan.

Layouts come from the rules, unless a tensor is stored elsewhere (`storage`) or may stay split for
longer (`postponed`). A partition rule plans each operation. The cut that decides where partial sums
are reduced comes after this (`partial_sums`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from meshdsl.layouts.layout import Layout
from meshdsl.layouts.mesh import Mesh
from meshdsl.layouts.tensor_layout import TensorLayout
from meshdsl.lowering.choices import USUAL, Choice
from meshdsl.lowering.graphs.from_nothing import constants
from meshdsl.lowering.options import DEFAULT, Options
from meshdsl.lowering.partition import Case, Plan, rule_of
from meshdsl.lowering.partition.attention.rules import unused
from meshdsl.lowering.placement.partial_sums import Planned
from meshdsl.lowering.placement.postponed import postponed
from meshdsl.lowering.placement.storage import stored
from meshdsl.lowering.writing.bodies import BODIES
from meshdsl.tensors.tensor import Tensor
from meshdsl.tracing.graph import Graph, Operation

NOTHING: Mapping[Tensor, TensorLayout] = MappingProxyType({})


def plan(
    graph: Graph,
    mesh: Mesh,
    layout: Layout,
    options: Options = DEFAULT,
    choice: Choice = USUAL,
    kept: Mapping[Tensor, TensorLayout] = NOTHING,
) -> Planned:
    """Gives every tensor its layout and every operation its plan.

    Args:
        kept: the layouts of what the forward pass keeps moved for the backward pass.
    """
    store = stored(graph, layout, mesh, choice.keep, choice.reduce_each)
    places = {**store, **kept}
    layouts: dict[Tensor, TensorLayout] = {}
    plans: dict[Operation, Plan] = {}
    cases: dict[Operation, Case] = {}

    def visit(graph: Graph, visit: Callable) -> None:
        for tensor in graph.inputs:
            layouts[tensor] = places.get(tensor) or layout.inside(tensor.shape)
        for op in graph.operations:
            for tensor in op.outputs:
                layouts[tensor] = places.get(tensor) or layout.inside(tensor.shape)
            for body in op.bodies:
                visit(body, visit)
            if op.name not in BODIES:
                operands = tuple([layouts[tensor] for tensor in op.inputs])
                results = tuple([layouts[tensor] for tensor in op.outputs])
                cases[op] = Case(op, operands, results, mesh, options, graph)
                plans[op] = rule_of(op)(cases[op])

    visit(graph, visit)  # given itself: a function that knows itself is garbage in a cycle
    constant = constants(graph)
    late = postponed(graph, layouts, plans, mesh, places, constant)
    layouts.update(late)
    for op, case in cases.items() if late else ():
        if any(t in late for t in (*op.inputs, *op.outputs)):
            moved = case_of(op, layouts, mesh)
            cases[op] = replace(case, operands=moved.operands, results=moved.results)
            plans[op] = rule_of(op)(cases[op])
    # Unused options are reported only if the user set them; here lowering tries a ring by itself.
    idle = () if choice.ring else tuple(unused([*cases.values()]))
    return Planned(graph, plans, layouts, mesh, constant, frozenset(store), kept, idle)


def case_of(
    op: Operation,
    layouts: Mapping[Tensor, TensorLayout],
    mesh: Mesh,
    without: frozenset[str] = frozenset(),
) -> Case:
    """Returns an operation with the layouts of its tensors, some axes left out if need be."""

    def of(tensors: Sequence[Tensor]) -> tuple[TensorLayout, ...]:
        return tuple(layouts[t].drop(without) if without else layouts[t] for t in tensors)

    return Case(op, of(op.inputs), of(op.outputs), mesh)
