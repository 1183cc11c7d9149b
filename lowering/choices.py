"""Choices: what lowering trades bytes on the wire for memory with, and how it decides.

Without a limit on memory, gathered weights are freed and gathered again, for that is what storing
them split is for; activations that both passes need moved are kept. With a limit, what fits it and
sends the fewest bytes is taken; of equals, what holds less.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace

from meshdsl.lowering.options import Options
from meshdsl.lowering.program import SpmdProgram
from meshdsl.lowering.reshard import SLOWER


@dataclass(frozen=True)
class Choice:
    """One way of lowering a program.

    Attributes:
        keep: whether gathered weights are kept, so that they are gathered once per step.
        share: whether the backward pass reads what the forward pass has moved.
        reduce_each: whether gradients that are stored split are reduced in each microbatch, rather
            than stay partial sums until the last one.
    """

    keep: bool = False
    share: bool = True
    reduce_each: bool = False


USUAL = Choice()


def choose(write: Callable[[Choice], SpmdProgram], options: Options) -> SpmdProgram:
    """Returns the program that sends the fewest bytes of those that fit into memory.

    If none fits, the one that holds least.
    """
    kept = {"keep": [True], "again": [False], "auto": [True, False]}[options.weights]
    if options.memory is None:
        return write(replace(USUAL, keep=options.weights == "keep"))
    programs = []
    for keep, share, each in itertools.product(kept, [True, False], [False, True]):
        program = write(Choice(keep, share, each))
        if program.peak_bytes <= options.memory and not programs:
            return program  # nothing sends less than what keeps and shares everything
        programs.append(program)
    fitting = [p for p in programs if p.peak_bytes <= options.memory]
    if fitting:
        return min(fitting, key=lambda p: (_sent(p), p.peak_bytes))
    return min(programs, key=lambda p: p.peak_bytes)


def _sent(program: SpmdProgram) -> float:
    """Returns the bytes that one device sends, those over slow axes weighed."""
    slow = program.mesh.slow
    found = sum(one.wire_bytes * one.count for one in program.collectives
                if not slow.isdisjoint(one.axes))  # fmt: skip
    return program.wire_bytes + (SLOWER - 1) * found
