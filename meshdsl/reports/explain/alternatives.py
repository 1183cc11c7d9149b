"""Alternatives: the same step by other options, and what each would send, hold and take.

Options trade bytes for memory (`lowering.options`). A report shows what each other choice would
cost.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import get_args

from meshdsl.layouts.hardware import Hardware
from meshdsl.lowering.costs.timeline import timeline
from meshdsl.lowering.naming import Names
from meshdsl.lowering.options import Context, Options, Weights
from meshdsl.lowering.program import SpmdProgram


@dataclass(frozen=True, slots=True)
class Alternative:
    """What a device sends, holds at its peak, and takes per step, if it is done `how`.

    Attributes:
        how: the flag, `--weights=keep`.
        seconds: as in `Timeline`.
    """

    how: str
    wire_bytes: float
    peak_bytes: int
    seconds: float


def alternatives(
    program: SpmdProgram, options: Options, lower: Callable[[Options], SpmdProgram]
) -> dict[str, SpmdProgram]:
    """Returns the program by every other option that might matter to it, by its flag.

    Args:
        options: those of the program.
        lower: what lowers the same function with other options.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # an option may well change nothing
        return {how: lower(other) for how, other in _others(program, options)}


def _others(program: SpmdProgram, options: Options) -> Iterator[tuple[str, Options]]:
    """Yields the options worth a try, without those that cannot change this program.

    What was decided by time says what the other way costs already.
    """
    if options.memory is not None:  # lowering has chosen among them
        return
    decided = {decision.name for decision in program.decisions}
    if "weights" not in decided and any(rule.scope for rule in program.layout.rules):
        weights: Weights = "again" if options.weights == "keep" else "keep"
        yield f"--weights={weights}", replace(options, weights=weights)
    split = {rule.dim for rule in program.layout.rules if rule.axes}
    attended = {i.params["memory"] for i, _ in program.block.walk() if i.op == "attention"}
    if split & attended:
        for context in get_args(Context):
            if context != options.context:
                yield f"--context={context}", replace(options, context=context)
        if not options.zigzag:
            yield "--zigzag", replace(options, zigzag=True)


def compared(
    program: SpmdProgram, others: Mapping[str, SpmdProgram], hardware: Hardware
) -> tuple[Alternative, ...]:
    """Returns the program itself, as `as it is`, and every other that differs from it.

    Nothing if none differs.
    """
    if not others:
        return ()
    first, *rest = (
        _measured(how, one, hardware) for how, one in [("as it is", program), *others.items()]
    )
    different = [one for one in rest if replace(one, how=first.how) != first]
    return (first, *different) if different else ()


def _measured(how: str, program: SpmdProgram, hardware: Hardware) -> Alternative:
    phases = dict.fromkeys(program.block.instructions, "")
    seconds = timeline(program, hardware, Names(program), phases).seconds
    return Alternative(how, program.wire_bytes, program.peak_bytes, seconds)
