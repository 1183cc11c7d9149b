"""Likely: the program of a point that time most likely decides on, without all the others.

To decide about a program, lowering writes and simulates about ten of them. Most points of a search
need only one: the choice that time takes for most steps, or the first of a few that fits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from meshdsl.lowering.choices import Choice
from meshdsl.lowering.costs.simulation import Simulator
from meshdsl.lowering.options import Options
from meshdsl.lowering.passes.halves import candidates, in_halves
from meshdsl.lowering.program import SpmdProgram
from meshdsl.search.space import Point


def likely_choices(point: Point, options: Options, reduces_each: bool) -> Iterator[Choice]:
    """Yields choices for a point, each with less memory than the one before.

    Most often, large collectives start apart: with FSDP, the step is much slower otherwise. Where
    gradients are stored split, they may be reduced in each microbatch; otherwise they are complete
    until the last one, and most large models do not fit. Moves of least time are left to those who
    know the times (`decisions.strays_from_bytes`).

    Args:
        reduces_each: whether to begin with gradients that are reduced in each microbatch.
    """
    choice = Choice(
        keep=options.weights == "keep",
        prefetch=options.prefetch,
        apart=options.bucket_bytes is None,
        halves="" if options.halves in ("auto", "none") else options.halves,
        again=options.weights == "again",
    )
    if sums_gradients(point):
        if not reduces_each:
            yield choice
        choice = replace(choice, reduce_each=True)
    yield choice
    yield replace(choice, share=False)


def sums_gradients(point: Point) -> bool:
    """Whether gradients that are stored split are added up over microbatches."""
    stores = any(rule.scope for rule in point.layout.rules)
    return stores and point.variant.microbatches > 1


def in_best_halves(
    program: SpmdProgram, simulator: Simulator, room: float
) -> tuple[SpmdProgram, float]:
    """Returns the fastest of a program and those with a dim in halves that fit, and its time."""
    halved = (in_halves(program, dim) for dim in candidates(program))
    return fastest_of([program, *halved], simulator, room)


def fastest_of(
    programs: Sequence[SpmdProgram | None], simulator: Simulator, room: float
) -> tuple[SpmdProgram, float]:
    """Returns the fastest of the programs that fit, and its time; without any, the first one."""
    first, *others = (program for program in programs if program is not None)
    fitting = [first, *(other for other in others if other.peak_bytes <= room)]
    timed = [(simulator.seconds(one), one) for one in fitting]
    seconds, fastest = min(timed, key=lambda row: row[0])
    return fastest, seconds
