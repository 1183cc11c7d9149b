"""Planning: every operation gets its strategy.

Strategies show where an equivalent graph sends less: sums of merged dims (`merged_sums`) and over
groups of a split dim (`group_sums`), and tensors that the backward pass need not move again
(`sharing`). This stage rewrites the graph, and places and plans its new operations. The others keep
their strategies.
"""

from __future__ import annotations

from dataclasses import replace

from meshdsl.layouts.layout import Layout
from meshdsl.lowering.choices import Choice
from meshdsl.lowering.graphs.group_sums import sum_groups
from meshdsl.lowering.graphs.merged_sums import sum_parts
from meshdsl.lowering.graphs.sharing import share
from meshdsl.lowering.graphs.simplify import prune, simplify
from meshdsl.lowering.graphs.wide_sums import widen
from meshdsl.lowering.partition import Case
from meshdsl.lowering.partition.attention.rules import readers, unused
from meshdsl.lowering.placement.joint import choose_jointly
from meshdsl.lowering.placement.partial_sums import place_reductions
from meshdsl.lowering.placement.placing import blocks_of, place
from meshdsl.lowering.stages import Placed, Planned, Reduced


def plan(placed: Placed, layout: Layout, choice: Choice) -> Planned:
    """Gives every operation its strategy, in a graph that is rewritten to send less.

    If products have chosen together, those that are rewritten do so too.
    """
    chooser, given, joint = placed.chooser, placed.given, placed.joint
    for rewrite in (sum_parts, sum_groups):
        rewritten = rewrite(placed)
        if rewritten is not placed.graph:
            graph = simplify(rewritten)
            placed = place(graph, layout, chooser, choice, given, before=placed)
    planned = _planned(placed)
    if choice.share:
        shared = share(planned)
        if shared.graph is not planned.graph:
            graph = prune(shared.graph)
            again = place(graph, layout, chooser, choice, given, shared.layouts, planned)
            planned = _planned(choose_jointly(again) if joint else again)
    # Unused options are reported only if the user set them; lowering may try a ring by itself.
    return planned if choice.context else replace(planned, unused=_unused(planned))


def reduce(planned: Planned, layout: Layout, choice: Choice) -> Reduced:
    """Decides where partial sums are reduced; sums in half precision are widened before.

    Raises:
        ValueError: a tensor cannot stay partial as a `Placement` says.
    """
    partial = place_reductions(planned)
    wide = widen(planned, partial, planned.chooser.options)
    if wide.graph is not planned.graph:
        moved = {**planned.moved, **wide.layouts}
        placed = place(
            prune(wide.graph), layout, planned.chooser, choice, planned.given, moved, planned
        )
        planned = replace(_planned(placed), unused=planned.unused)
        partial = place_reductions(planned)
    return Reduced(planned, partial)


def _planned(placed: Placed) -> Planned:
    return Planned(**vars(placed))


def _unused(planned: Planned) -> tuple[str, ...]:
    """Returns messages about options for attention that have no effect."""
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
