"""Choices: lowering writes a program several ways, and takes one.

Without a limit on memory, gathered weights are freed and gathered again: storing them split is
meant to save memory. `placement.keeping` keeps those that hardly raise the peak. Activations that
both passes need moved are kept.

With a limit, the program that sends the fewest bytes is chosen among those that fit; among equals,
the one with the lower peak.

Where the hardware is known, time decides: the program that is chosen as above is changed in one way
after the other, and a change stays if the step is faster by simulation and fits into memory. The
changes are: weights are kept from the forward to the backward pass; a dim is computed in halves.
`SpmdProgram.decisions` lists what each of them costs.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

from meshdsl.layouts.hardware import Hardware
from meshdsl.layouts.layout import Layout
from meshdsl.lowering.communication.reshard_search import SLOWER
from meshdsl.lowering.options import Options
from meshdsl.lowering.passes.halves import candidates
from meshdsl.lowering.program import Alternative, Decision, SpmdProgram
from meshdsl.lowering.writing.loops import is_sum, within
from meshdsl.tracing.graph import Graph, Operation


@dataclass(frozen=True)
class Choice:
    """One way of lowering a program.

    Attributes:
        keep: whether gathered weights are kept, so that they are gathered once per step.
        share: whether the backward pass reads the tensors that the forward pass has moved.
        reduce_each: whether gradients that are stored split are reduced in each microbatch; else
            they stay partial sums until the last one.
        ring: whether attention sends a split memory around a ring; else it gathers the memory.
        prefetch: whether loops gather the weights of the next iteration during the present one.
        halves: the dim whose halves are computed side by side; empty: none.
    """

    keep: bool = False
    share: bool = True
    reduce_each: bool = False
    ring: bool = False
    prefetch: bool = False
    halves: str = ""


USUAL = Choice()
_ROOM = 0.85  # the share of the memory that faster programs may plan with
_GAIN = 0.01  # a change that gains less is not worth a larger program


class HasProgram(Protocol):
    """A lowering that ends in a program."""

    @property
    def program(self) -> SpmdProgram: ...


_Lowered = TypeVar("_Lowered", bound=HasProgram)


def choose(
    write: Callable[[Choice], _Lowered],
    graph: Graph,
    layout: Layout,
    options: Options,
    hardware: Hardware | None = None,
) -> tuple[_Lowered, tuple[Decision, ...]]:
    """Returns the lowering to take, and what was decided by time; see above.

    If no program fits into memory, it is the one with the lowest peak. Rings, and then programs
    without prefetch, are tried only if no other program fits.
    """
    forced = "" if options.halves in ("auto", "none") else options.halves

    def in_halves(choice: Choice) -> _Lowered:
        return write(replace(choice, halves=forced))

    choice, lowered = _by_bytes(in_halves, graph, layout, options)
    if hardware is None:
        return lowered, ()
    room = hardware.memory_bytes if options.memory is None else options.memory
    if options.memory is None and lowered.program.peak_bytes > room:
        limited = replace(options, memory=room)
        choice, lowered = _by_bytes(in_halves, graph, layout, limited)
    usual = replace(choice, halves=forced)
    return _by_time(write, usual, lowered, layout, options, hardware)


def _by_bytes(
    write: Callable[[Choice], _Lowered], graph: Graph, layout: Layout, options: Options
) -> tuple[Choice, _Lowered]:
    """Returns the lowering that sends the fewest bytes among those that fit into memory."""
    if options.memory is None:
        usual = Choice(keep=options.weights == "keep", prefetch=options.prefetch)
        return usual, write(usual)
    limit = options.memory
    lowered: list[tuple[Choice, _Lowered]] = []
    for choices in _choices(graph, layout, options):
        for choice in choices:
            keeps_and_shares_all = replace(choice, reduce_each=False) == choices[0]
            if lowered and lowered[0][1].program.peak_bytes <= limit and not keeps_and_shares_all:
                break  # the program that keeps and shares everything sends the fewest bytes
            lowered.append((choice, write(choice)))
        fitting = [row for row in lowered if row[1].program.peak_bytes <= limit]
        if fitting:
            return min(fitting, key=lambda row: _cost(row[1].program))
    return min(lowered, key=lambda row: row[1].program.peak_bytes)


def _by_time(
    write: Callable[[Choice], _Lowered],
    usual: Choice,
    lowered: _Lowered,
    layout: Layout,
    options: Options,
    hardware: Hardware,
) -> tuple[_Lowered, tuple[Decision, ...]]:
    """Returns the fastest lowering by simulation; each change is tried on the best one before it.

    Args:
        usual, lowered: what would be chosen without the hardware.
    """
    from meshdsl.lowering.costs.simulation import simulate

    room = hardware.memory_bytes if options.memory is None else options.memory
    # A plan may be below the compiler's peak, and a change of speed must not cost the run.
    allowed = max(_ROOM * room, lowered.program.peak_bytes)
    best, best_choice = lowered, usual
    seconds = simulate(lowered.program, hardware).seconds
    decisions: list[Decision] = []
    changes: list[tuple[str, str, str, Choice]] = []
    stores = any(rule.scope for rule in layout.rules)
    if stores and options.weights == "auto" and not usual.keep:
        changes.append(("weights", "gathered again", "kept", Choice(keep=True)))
    if options.halves == "auto":
        dims = candidates(lowered.program)
        changes += [("halves", "none", dim, Choice(halves=dim)) for dim in dims]
    for name, before, after, change in changes:
        keep, halves = best_choice.keep or change.keep, change.halves or best_choice.halves
        choice = replace(best_choice, keep=keep, halves=halves)
        other = write(choice)
        if other.program is best.program:
            continue
        time = simulate(other.program, hardware).seconds
        fits = other.program.peak_bytes <= allowed
        stays = fits and time < (1 - _GAIN) * seconds
        old = Alternative(before, seconds, best.program.peak_bytes)
        new = Alternative(after, time, other.program.peak_bytes)
        decisions.append(
            Decision(name, new, old, fits) if stays else Decision(name, old, new, fits)
        )
        if stays:
            best, best_choice, seconds = other, choice, time
            if name == "halves":
                break
    return best, tuple(decisions)


def _choices(graph: Graph, layout: Layout, options: Options) -> Iterator[list[Choice]]:
    """Yields lists of choices; a list is tried if no program of the lists before it fits.

    Choices that cannot change the program of this graph are left out.
    """
    names = {op.name for op in within(graph)}
    sums = any(op.name == "scan" and _has_running_sum(op) for op in within(graph))
    stores = any(rule.scope for rule in layout.rules)
    keeps = {"keep": [True], "again": [False], "auto": [True, False]}[options.weights]
    shares = [True, False] if names & {"barrier", "scan"} else [True]
    reductions = [False, True] if stores and sums else [False]
    rings = [False, True] if options.context == "auto" and "attention" in names else [False]
    prefetches = [True, False] if options.prefetch else [False]
    for prefetch, ring in itertools.product(prefetches, rings):
        rest = itertools.product(keeps if stores else [False], shares, reductions)
        yield [Choice(*choice, ring, prefetch) for choice in rest]


def _has_running_sum(scan: Operation) -> bool:
    """Whether a loop has a running sum."""
    body, consts = scan.params["body"], scan.params["consts"]
    return any(is_sum(body, consts + i, i) for i in range(scan.params["carries"]))


def _cost(program: SpmdProgram) -> tuple[float, int]:
    """Returns the bytes that one device sends, and its peak, to compare programs by.

    Bytes over slow axes count `SLOWER` times.
    """
    slow = program.mesh.slow
    over_slow_axes = sum(
        collective.wire_bytes * collective.count
        for collective in program.collectives
        if not slow.isdisjoint(collective.axes)
    )
    return program.wire_bytes + (SLOWER - 1) * over_slow_axes, program.peak_bytes
