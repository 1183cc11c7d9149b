"""Choices: what lowering trades bytes on the wire for memory with, and how it decides.

Without a limit on memory, gathered weights are freed and gathered again, for that is what storing
them split is for, unless the peak has room for them (see `keeping`); activations that both passes
need moved are kept. With a limit, what fits it and sends the fewest bytes is taken; of equals, what
holds less.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

from meshdsl.layouts.layout import Layout
from meshdsl.lowering.communication.reshard_search import SLOWER
from meshdsl.lowering.options import Options
from meshdsl.lowering.program import SpmdProgram
from meshdsl.lowering.writing.loops import is_sum, within
from meshdsl.tracing.graph import Graph, Operation


@dataclass(frozen=True)
class Choice:
    """One way of lowering a program.

    Attributes:
        keep: whether gathered weights are kept, so that they are gathered once per step.
        share: whether the backward pass reads what the forward pass has moved.
        reduce_each: whether gradients that are stored split are reduced in each microbatch, rather
            than stay partial sums until the last one.
        ring: whether attention sends a split memory around rather than gather it.
        prefetch: whether loops gather what an iteration needs while the one before is computed.
    """

    keep: bool = False
    share: bool = True
    reduce_each: bool = False
    ring: bool = False
    prefetch: bool = False


USUAL = Choice()


class HasProgram(Protocol):
    """A lowering that ends in a program."""

    @property
    def program(self) -> SpmdProgram: ...


_Lowered = TypeVar("_Lowered", bound=HasProgram)


def choose(
    write: Callable[[Choice], _Lowered], graph: Graph, layout: Layout, options: Options
) -> _Lowered:
    """Returns the lowering whose program sends the fewest bytes of those that fit into memory.

    If none fits, the one that holds least. A split memory is sent around, and gathering ahead given
    up, only if nothing fits otherwise.
    """
    if options.memory is None:
        return write(Choice(keep=options.weights == "keep", prefetch=options.prefetch))
    limit = options.memory
    lowered: list[_Lowered] = []
    for choices in _ways(graph, layout, options):
        for choice in choices:
            everything = replace(choice, reduce_each=False) == choices[0]
            if lowered and lowered[0].program.peak_bytes <= limit and not everything:
                break  # nothing sends less than what keeps and shares everything
            lowered.append(write(choice))
        fitting = [one for one in lowered if one.program.peak_bytes <= limit]
        if fitting:
            return min(fitting, key=lambda one: (_sent(one.program), one.program.peak_bytes))
    return min(lowered, key=lambda one: one.program.peak_bytes)


def _ways(graph: Graph, layout: Layout, options: Options) -> Iterator[list[Choice]]:
    """Yields the choices, as far as a program may differ by them: those come last that are
    taken only if nothing else fits."""
    names = {op.name for op in within(graph)}
    sums = any(op.name == "scan" and _adds_up(op) for op in within(graph))
    stores = any(rule.scope for rule in layout.rules)
    kept = {"keep": [True], "again": [False], "auto": [True, False]}[options.weights]
    shared = [True, False] if names & {"barrier", "scan"} else [True]
    each = [False, True] if stores and sums else [False]
    rings = [False, True] if options.context == "auto" and "attention" in names else [False]
    for ahead, ring in itertools.product([True, False] if options.prefetch else [False], rings):
        of_one_kind = itertools.product(kept if stores else [False], shared, each)
        yield [Choice(*choice, ring, ahead) for choice in of_one_kind]


def _adds_up(scan: Operation) -> bool:
    """Whether a loop adds something up."""
    body, consts = scan.params["body"], scan.params["consts"]
    return any(is_sum(body, consts + i, i) for i in range(scan.params["carries"]))


def _sent(program: SpmdProgram) -> float:
    """Returns the bytes that one device sends, those over slow axes weighed."""
    slow = program.mesh.slow
    found = sum(one.wire_bytes * one.count for one in program.collectives
                if not slow.isdisjoint(one.axes))  # fmt: skip
    return program.wire_bytes + (SLOWER - 1) * found
