"""Passes: pure functions from a program to an equal one that sends sooner, or less often.

Their order: rings need each gather and reduction by itself (`overlap`), so what is left is joined
after that (`bucket`), and whole buckets are gathered ahead (`prefetch`). What these leave behind
goes (`tidy`); before, there is nothing twice, for it is not written twice (`builder`). The order in
which all this is issued comes last (`schedule`). Every pass leaves a program that is well formed
(`verify`); each given its own result returns it as it is.
"""

from __future__ import annotations

from collections.abc import Callable

from meshdsl.lowering.options import Options
from meshdsl.lowering.passes.bucket import bucket
from meshdsl.lowering.passes.overlap import overlap
from meshdsl.lowering.passes.prefetch import prefetch
from meshdsl.lowering.passes.schedule import schedule
from meshdsl.lowering.passes.tidy import tidy
from meshdsl.lowering.program import SpmdProgram

Pass = Callable[[SpmdProgram, Options], SpmdProgram]

PASSES: tuple[Pass, ...] = (overlap, bucket, prefetch, tidy, schedule)


def run_passes(program: SpmdProgram, options: Options) -> SpmdProgram:
    """Returns the program after all passes, in order."""
    for one in PASSES:
        program = one(program, options)
    return program
