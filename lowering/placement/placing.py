"""Placing: every tensor of a graph gets its layout.

Layouts come from the rules, unless a tensor has the layout of storage (`storage`), stays split for
longer (`late_gathers`), or has a layout in a `Placement`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType

from meshdsl.layouts.layout import Layout
from meshdsl.layouts.tensor_layout import TensorLayout
from meshdsl.lowering.choices import USUAL, Choice
from meshdsl.lowering.graphs.from_nothing import constants
from meshdsl.lowering.partition import Strategy
from meshdsl.lowering.partition.attention.rules import readers
from meshdsl.lowering.placement.choosing import Chooser
from meshdsl.lowering.placement.late_gathers import gathered_late
from meshdsl.lowering.placement.storage import stored
from meshdsl.lowering.stages import Given, Placed
from meshdsl.lowering.writing.bodies import BODIES
from meshdsl.tensors.tensor import Tensor
from meshdsl.tracing.graph import Graph, Operation

NOTHING: Mapping[Tensor, TensorLayout] = MappingProxyType({})


def place(
    graph: Graph,
    layout: Layout,
    chooser: Chooser,
    choice: Choice = USUAL,
    given: Given | None = None,
    moved: Mapping[Tensor, TensorLayout] = NOTHING,
    before: Placed | None = None,
) -> Placed:
    """Gives every tensor its layout.

        place(graph, layout, Chooser(mesh)).layouts

    Args:
        given: the layouts that a `Placement` gives.
        moved: the layouts of tensors that the forward pass keeps in another layout for the backward
            pass.
        before: the placed graph that this graph was rewritten from; operations that are in both
            keep their strategies.
    """
    given = given or Given()
    fixed = {**given.tensors, **dict(_read_by_conditions(graph, given))}
    store = stored(graph, layout, chooser, choice.keep, choice.reduce_each, choice.again)
    store = {t: stored_as for t, stored_as in store.items() if fixed.get(t, stored_as) == stored_as}
    special = {**store, **moved, **fixed}
    layouts = {t: special.get(t) or layout.inside(t.shape) for t in _tensors(graph)}
    strategies = strategies_of(graph, chooser, layouts, before)
    constant = constants(graph)
    split_longer = gathered_late(graph, layouts, strategies, chooser, special, constant)
    if split_longer:
        layouts.update(split_longer)
        for op in _operations(graph):
            if any(t in split_longer for t in (*op.inputs, *op.outputs)):
                del strategies[op]
        known = Placed(graph, chooser, layouts, strategies=strategies)
        strategies = strategies_of(graph, chooser, layouts, known)
    return Placed(graph, chooser, layouts, constant, frozenset(store), moved, given, strategies)


def strategies_of(
    graph: Graph,
    chooser: Chooser,
    layouts: Mapping[Tensor, TensorLayout],
    before: Placed | None = None,
) -> dict[Operation, Strategy]:
    """Returns the strategies of all operations without bodies.

    Args:
        before: a placed graph whose strategies are kept if the layouts are the same.
    """
    strategies: dict[Operation, Strategy] = {}
    for block in blocks_of(graph):
        reader_counts = readers(block)
        for op in block.operations:
            if op.name in BODIES:
                continue
            if before is not None and op in before.strategies and op not in reader_counts:
                tensors = (*op.inputs, *op.outputs)
                if all(before.layouts[t] is layouts[t] for t in tensors):
                    strategies[op] = before.strategies[op]
                    continue
            operands = [layouts[tensor] for tensor in op.inputs]
            results = [layouts[tensor] for tensor in op.outputs]
            strategies[op] = chooser.strategy(op, operands, results, reader_counts.get(op, 1))
    return strategies


def _read_by_conditions(graph: Graph, given: Given) -> Iterator[tuple[Tensor, TensorLayout]]:
    """Yields the carries that conditions of while loops read, with the layouts given for them.

    A condition reads the carries where the body has them.
    """
    if not given.tensors:
        return
    for block in blocks_of(graph):
        for op in block.operations:
            if op.name == "while_loop":
                consts = op.params["consts"]
                carries = op.params["condition"].inputs[consts:], op.params["body"].inputs[consts:]
                for read, carry in zip(*carries, strict=True):
                    if carry in given.tensors:
                        yield read, given.tensors[carry]


def blocks_of(graph: Graph) -> Iterator[Graph]:
    """Yields a graph and its bodies."""
    yield graph
    for op in graph.operations:
        for body in op.bodies:
            yield from blocks_of(body)


def _operations(graph: Graph) -> Iterator[Operation]:
    for block in blocks_of(graph):
        for op in block.operations:
            if op.name not in BODIES:
                yield op


def _tensors(graph: Graph) -> Iterator[Tensor]:
    for block in blocks_of(graph):
        yield from block.inputs
        for op in block.operations:
            yield from op.outputs
