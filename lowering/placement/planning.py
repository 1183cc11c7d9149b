"""Planning: every operation gets its strategy.

Strategies show where an equal graph sends less: sums over groups of a split dim (`group_sums`), and
what the backward pass need not move again (`sharing`). The graph is then rewritten; what is new in
it is placed and planned within this stage, and what is not keeps its strategy.
"""

from __future__ import annotations

from dataclasses import replace

from meshdsl.layouts.layout import Layout
from meshdsl.lowering.choices import Choice
from meshdsl.lowering.graphs.group_sums import sum_groups
from meshdsl.lowering.graphs.sharing import share
from meshdsl.lowering.graphs.simplify import prune, simplify
from meshdsl.lowering.graphs.wide_sums import widen
from meshdsl.lowering.partition import Case
from meshdsl.lowering.partition.attention.rules import readers, unused
from meshdsl.lowering.placement.partial_sums import place_reductions
from meshdsl.lowering.placement.placing import blocks_of, place, strategies_of
from meshdsl.lowering.stages import Placed, Planned, Reduced


def plan(placed: Placed, layout: Layout, choice: Choice) -> Planned:
    """Gives every operation its strategy, in a graph that is rewritten to send less."""
    chooser, given = placed.chooser, placed.given
    grouped = sum_groups(placed)
    if grouped is not placed.graph:
        graph = simplify(grouped)
        placed = place(graph, layout, chooser, choice, given, before=placed)
    planned = _planned(placed)
    if choice.share:
        shared = share(planned)
        if shared.graph is not planned.graph:
            graph = prune(shared.graph)
            again = place(graph, layout, chooser, choice, given, shared.places, planned)
            planned = _planned(again)
    # Unused options are told only if the user set them; a ring may be lowering's own try.
    return planned if choice.ring else replace(planned, unused=_unused(planned))


def reduce(planned: Planned, layout: Layout, choice: Choice) -> Reduced:
    """Decides where partial sums become whole; those of half precision are made wide before.

    Raises:
        ValueError: a tensor cannot stay partial as a `Placement` says.
    """
    partial = place_reductions(planned)
    wide = widen(planned, partial, planned.chooser.options)
    if wide.graph is not planned.graph:
        moved = {**planned.moved, **wide.places}
        placed = place(
            prune(wide.graph), layout, planned.chooser, choice, planned.given, moved, planned
        )
        planned = replace(_planned(placed), unused=planned.unused)
        partial = place_reductions(planned)
    return Reduced(planned, partial)


def _planned(placed: Placed) -> Planned:
    strategies = strategies_of(placed.graph, placed.chooser, placed.layouts, placed)
    return Planned(**{**vars(placed), "strategies": strategies})


def _unused(planned: Planned) -> tuple[str, ...]:
    """Returns the options for attention that change nothing, in words."""
    layouts, chooser = planned.layouts, planned.chooser
    cases = [
        Case(
            op,
            tuple(layouts[tensor] for tensor in op.inputs),
            tuple(layouts[tensor] for tensor in op.outputs),
            chooser.mesh,
            chooser.options,
            times,
        )
        for block in blocks_of(planned.graph)
        for op, times in readers(block).items()
    ]
    return tuple(unused(cases, chooser.cheapest))
