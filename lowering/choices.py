"""Choices: lowering writes a program several ways, and takes one.

Without a limit on memory, gathered weights are freed and gathered again: storing them split is
meant to save memory. `placement.keeping` keeps those that hardly raise the peak. Activations that
both passes need moved are kept.

With a limit, the program that sends the fewest bytes is chosen among those that fit; among equals,
the one with the lower peak.

Where the hardware is known, `lowering.decisions` goes on from there.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Literal, Protocol, TypeVar

from meshdsl.layouts.layout import Layout
from meshdsl.layouts.prices import LinkPrices
from meshdsl.lowering.communication.reshard_search import SLOWER
from meshdsl.lowering.options import Context, Options
from meshdsl.lowering.program import SpmdProgram
from meshdsl.lowering.writing.loops import is_sum, within
from meshdsl.tracing.graph import Graph, Operation


@dataclass(frozen=True)
class Choice:
    """One way of lowering a program.

    Attributes:
        keep: whether gathered weights are kept, so that they are gathered once per step.
        again: whether the weights of a pipeline's layers are gathered again in each pass over
            them; else they are gathered once per step.
        share: whether the backward pass reads the tensors that the forward pass has moved.
        reduce_each: whether gradients that are stored split are reduced in each microbatch; else
            they stay partial sums until the last one.
        context: how attention reads a split memory, as in `Options.context`; empty: as that says.
        prefetch: whether loops gather the weights of the next iteration during the present one.
        apart: whether each large collective starts as soon as its operand is ready: only small ones
            are joined (see `decisions.small_bytes`), and loops reduce large results slice by slice.
        halves: the dim whose halves are computed side by side; empty: none.
        joint: whether products choose their strategies together where that sends less (see
            `placement.joint`); else each takes the one that sends the fewest bytes by itself.
        timed: whether moves are chosen by what they take on the links of the hardware; else by
            their bytes.
    """

    keep: bool = False
    share: bool = True
    reduce_each: bool = False
    context: Context | Literal[""] = ""
    prefetch: bool = False
    apart: bool = False
    halves: str = ""
    again: bool = False
    joint: bool = True
    timed: bool = False


USUAL = Choice()


class HasProgram(Protocol):
    """A lowering that ends in a program."""

    @property
    def program(self) -> SpmdProgram: ...


Lowered = TypeVar("Lowered", bound=HasProgram)


def choose(
    write: Callable[[Choice], Lowered],
    graph: Graph,
    layout: Layout,
    options: Options,
) -> tuple[Choice, Lowered]:
    """Returns the choice to take without knowing the hardware, and its lowering; see above.

    If no program fits into memory, it is the one with the lowest peak. Rings, and then programs
    without prefetch, are tried only if no other program fits.
    """
    if options.memory is None:
        usual = Choice(
            keep=options.weights == "keep",
            prefetch=options.prefetch,
            halves=_halves(options),
            again=options.weights == "again",
        )
        return usual, write(usual)
    limit = options.memory
    lowered: list[tuple[Choice, Lowered]] = []
    for choices in _choices(graph, layout, options):
        for choice in choices:
            keeps_and_shares_all = replace(choice, reduce_each=False) == choices[0]
            if lowered and lowered[0][1].program.peak_bytes <= limit and not keeps_and_shares_all:
                break  # the program that keeps and shares everything sends the fewest bytes
            lowered.append((choice, write(choice)))
        fitting = [row for row in lowered if row[1].program.peak_bytes <= limit]
        if fitting:
            return min(fitting, key=lambda row: cost_of(row[1].program))
    return min(lowered, key=lambda row: row[1].program.peak_bytes)


def _halves(options: Options) -> str:
    """Returns the dim of which options ask for halves; empty if they do not."""
    return "" if options.halves in ("auto", "none") else options.halves


def _choices(graph: Graph, layout: Layout, options: Options) -> Iterator[list[Choice]]:
    """Yields lists of choices; a list is tried if no program of the lists before it fits.

    Choices that cannot change the program of this graph are left out.
    """
    count = Counter(op.name for op in within(graph))
    names = set(count)
    joints = [True, False] if count["einsum"] > 1 else [True]
    sums = any(op.name == "scan" and _has_running_sum(op) for op in within(graph))
    stores = any(rule.scope for rule in layout.rules)
    keeps = {"keep": [True], "again": [False], "auto": [True, False]}[options.weights]
    shares = [True, False] if names & {"barrier", "scan"} else [True]
    reductions = [False, True] if stores and sums else [False]
    rings = options.context == "auto" and "attention" in names
    contexts: list[Context | Literal[""]] = ["", "ring"] if rings else [""]
    prefetches = [True, False] if options.prefetch else [False]
    agains = [options.weights == "again"]
    if stores and options.weights == "auto" and "deal_to_stages" in names:
        agains = [False, True]
    for again, prefetch, context in itertools.product(agains, prefetches, contexts):
        rest = itertools.product(joints, keeps if stores else [False], shares, reductions)
        halves = _halves(options)
        yield [
            Choice(
                keep,
                share,
                reduce_each,
                context,
                prefetch,
                halves=halves,
                again=again,
                joint=joint,
            )
            for joint, keep, share, reduce_each in rest
        ]


def _has_running_sum(scan: Operation) -> bool:
    """Whether a loop has a running sum."""
    body, consts = scan.params["body"], scan.params["consts"]
    return any(is_sum(body, consts + i, i) for i in range(scan.params["carries"]))


def cost_of(program: SpmdProgram, prices: LinkPrices | None = None) -> tuple[float, int]:
    """Returns the bytes that one device sends, and its peak, to compare programs by.

    Bytes over slow axes count `SLOWER` times. With prices, these say what all bytes count.
    """
    if prices is not None:
        sent = (prices.cost(c.kind, c.axes, c.wire_bytes) * c.count for c in program.collectives)
        return math.fsum(sent), program.peak_bytes
    slow = program.mesh.slow
    over_slow_axes = sum(
        collective.wire_bytes * collective.count
        for collective in program.collectives
        if not slow.isdisjoint(collective.axes)
    )
    return program.wire_bytes + (SLOWER - 1) * over_slow_axes, program.peak_bytes
