"""Processor time of an evaluation where time decides: one changed decision, simulated again.

For each change of the usual program: what writing it costs, its simulation from nothing, and its
simulation by a `Simulator` that knows the usual program. The two are the same number.

Run: python -m tests.benchmarks.evaluation_time [PAIR ...]
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from meshdsl.layouts.hardware import Hardware, hardware
from meshdsl.lowering import lower as lowering
from meshdsl.lowering.choices import USUAL, Choice
from meshdsl.lowering.costs.simulation import Simulator, step_seconds
from meshdsl.lowering.program import SpmdProgram
from tests.benchmarks.pairs import PAIRS, jitted

_TIMES = 7
_CHANGES = {
    "collectives apart": replace(USUAL, apart=True),
    "weights kept": replace(USUAL, keep=True),
    "halves of the batch": replace(USUAL, halves="batch"),
}


def milliseconds(action: Callable[[], object]) -> float:
    """Returns the processor time of an action."""
    start = time.process_time()
    action()
    return 1e3 * (time.process_time() - start)


def writer_of(pair: str) -> Callable[[Choice], SpmdProgram]:
    """Returns what lowers a pair for a choice, as the decisions by time do."""
    function, arguments = jitted(PAIRS[pair], hardware="v5p")
    function.trace(*arguments)
    found: list[Callable] = []
    decide = lowering.decide

    def catch(write: Callable, *rest: object) -> object:
        found.append(write)
        return decide(write, *rest)

    lowering.decide = catch
    try:
        function.lower(*arguments)
    finally:
        lowering.decide = decide
    return lambda choice: found[0](choice).program


def after(usual: SpmdProgram, program: SpmdProgram, kind: Hardware) -> float:
    """Returns the milliseconds of a program's simulation by what knows the usual one."""
    simulator = Simulator(kind)
    simulator.seconds(usual)
    taken = milliseconds(lambda: simulator.seconds(program))
    assert simulator.seconds(program) == step_seconds(program, kind)
    return taken


def report(pair: str) -> None:
    """Prints a line for each change."""
    kind, write = hardware("v5p"), writer_of(pair)
    usual = write(USUAL)
    for name, choice in _CHANGES.items():
        program = write(choice)
        fresh = min(milliseconds(partial(step_seconds, program, kind)) for _ in range(_TIMES))
        known = min(after(usual, program, kind) for _ in range(_TIMES))
        copies = [replace(program) for _ in range(_TIMES)]  # which know nothing of their memory
        peak = min(milliseconds(partial(getattr, each, "peak_bytes")) for each in copies)
        count = sum(1 for _ in program.block.walk())
        print(
            f"{pair}, {name}: {count} instructions; simulated from nothing {fresh:.1f} ms, "
            f"after the usual program {known:.1f} ms; its memory {peak:.1f} ms"
        )


if __name__ == "__main__":
    for each in sys.argv[1:] or ["decoder_tensor", "decoder_fsdp_sequence"]:
        report(each)
