"""Processor time of an evaluation where time decides: one changed decision, written and simulated.

For each change of the usual program: what writing it costs once the usual one is written, its
simulation by a `Simulator` that knows the usual program, its simulation from nothing, and its
memory. Both simulations give the same number.

Run: python -m tests.benchmarks.evaluation_time [PAIR or gpt3_175b ...]
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial

import meshdsl as md
from meshdsl import optim
from meshdsl.layouts.hardware import Hardware, hardware
from meshdsl.lowering import lower as lowering
from meshdsl.lowering.choices import USUAL, Choice
from meshdsl.lowering.costs.memory import _known_peak
from meshdsl.lowering.costs.simulation import Simulator, step_seconds
from meshdsl.lowering.lower import Stages
from meshdsl.lowering.options import Options
from meshdsl.lowering.program import SpmdProgram
from meshdsl.models import load
from meshdsl.running.garbage import paused
from meshdsl.running.jit import Jitted
from meshdsl.training.state import create, spec_of
from meshdsl.training.step import make_train_step
from tests.benchmarks.pairs import PAIRS, jitted

_TIMES = 7
_MESH = "data:64,model:8"
_LAYOUT = "batch:data; heads:model; d_ff:model; vocab:model; length:model?; params/embed:data"
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


@cache
def step_of(name: str) -> tuple[Jitted, tuple[object, ...]]:
    """Returns the step of a pair, or that of gpt3_175b on 512 chips as README has it."""
    if name in PAIRS:
        return jitted(PAIRS[name], hardware="v5p")
    model, optimizer = load(name), optim.AdamW(1e-3)
    state = spec_of(create(model.init, optimizer))
    batch = model.batch_spec(model.batch_size, model.length)
    step, options = make_train_step(model.loss, optimizer), Options(hardware="v5p")
    return md.jit(step, _MESH, _LAYOUT, donate="state", options=options), (state, batch)


def writer_of(name: str) -> Callable[[Choice], Stages]:
    """Returns what lowers a step for a choice, as the decisions by time do."""
    function, arguments = step_of(name)
    function.trace(*arguments)
    found: list[Callable] = []
    decide = lowering.decide

    def catch(write: Callable, *rest: object) -> object:
        found.append(write)
        return write(USUAL), ()

    lowering.decide = catch
    try:
        function.lower(*arguments)
    finally:
        lowering.decide = decide
    return found[0]


def after(usual: SpmdProgram, program: SpmdProgram, kind: Hardware) -> float:
    """Returns the milliseconds of a program's simulation by what knows the usual one."""
    simulator = Simulator(kind)
    simulator.seconds(usual)
    taken = milliseconds(lambda: simulator.seconds(program))
    assert simulator.seconds(program) == step_seconds(program, kind)
    return taken


def written(name: str, choice: Choice) -> float:
    """Returns the milliseconds that it takes to write a choice once the usual one is written."""
    write = writer_of(name)
    write(USUAL)
    return milliseconds(lambda: write(choice))


def peak(program: SpmdProgram) -> float:
    """Returns the milliseconds of a program's memory, from nothing."""
    _known_peak.cache_clear()
    copy = replace(program)  # which knows nothing of its memory
    return milliseconds(lambda: copy.peak_bytes)


def report(name: str) -> None:
    """Prints a line for each change."""
    kind, write = hardware("v5p"), writer_of(name)
    usual = write(USUAL)
    for change, choice in _CHANGES.items():
        program = write(choice).program
        figures = {
            "written": lambda choice=choice: written(name, choice),
            "simulated after the usual program": lambda p=program: after(usual.program, p, kind),
            "from nothing": lambda p=program: milliseconds(partial(step_seconds, p, kind)),
            "its memory": lambda p=program: peak(p),
        }
        count = sum(1 for _ in program.block.walk())
        times = (f"{what} {min(one() for _ in range(_TIMES)):.1f}" for what, one in figures.items())
        print(f"{name}, {change}: {count} instructions; ms: {', '.join(times)}")


if __name__ == "__main__":
    with paused():
        for each in sys.argv[1:] or ["decoder_tensor", "decoder_fsdp_sequence", "gpt3_175b"]:
            report(each)
