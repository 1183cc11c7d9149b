"""Passes: pure functions from a program to an equivalent one that sends sooner, or less often.

Their order:

- `overlap` first: rings need each gather and reduction by itself.
- `bucket` joins the remaining collectives.
- `tidy` removes duplicate and unneeded instructions. The passes before it add them; `builder`
  writes none.
- `touched_rows` computes with the rows of large tables that were looked up, instead of gradients
  as large as the tables.
- `schedule` orders the instructions.

Every pass returns a well-formed program (`verify`). Every pass returns its own result unchanged.

After all of them, `lowering.choices` may ask for changes that need memory or larger programs, in
this order: `prefetch` gathers entire buckets one iteration ahead, and `halves` computes two halves
of a dim side by side.
"""

from __future__ import annotations

from collections.abc import Callable

from meshdsl.lowering.options import Options
from meshdsl.lowering.passes.bucket import bucket
from meshdsl.lowering.passes.overlap import overlap
from meshdsl.lowering.passes.schedule import schedule
from meshdsl.lowering.passes.tidy import tidy
from meshdsl.lowering.passes.touched_rows import touched_rows
from meshdsl.lowering.program import SpmdProgram

Pass = Callable[[SpmdProgram, Options], SpmdProgram]

PASSES: tuple[Pass, ...] = (overlap, bucket, tidy, touched_rows, schedule)


def run_passes(program: SpmdProgram, options: Options) -> SpmdProgram:
    """Returns the program after all passes, in order."""
    for pass_ in PASSES:
        program = pass_(program, options)
    return program
