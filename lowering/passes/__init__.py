"""Passes: pure functions from a program to an equal one that sends sooner, or less often."""

from __future__ import annotations

from collections.abc import Callable

from meshdsl.lowering.options import Options
from meshdsl.lowering.program import SpmdProgram

Pass = Callable[[SpmdProgram, Options], SpmdProgram]

PASSES: tuple[Pass, ...] = ()


def run_passes(program: SpmdProgram, options: Options) -> SpmdProgram:
    """Returns the program after all passes, in order."""
    for one in PASSES:
        program = one(program, options)
    return program
