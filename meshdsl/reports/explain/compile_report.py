"""The report of `meshdsl compile`: whether a program fits, what it sends, plan beside compiler.

Without a compiler for the machine there is the plan alone, and the report says so.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from meshdsl.layouts.topologies import Topology
from meshdsl.lowering.compiled import Compiled, planned
from meshdsl.lowering.costs.units import show_bytes, show_seconds
from meshdsl.lowering.program import COLLECTIVES, SpmdProgram
from meshdsl.reports.explain.compiled_time import time_of_step
from meshdsl.reports.explain.explanation import Explanation
from meshdsl.reports.explain.lines import table, wrapped
from meshdsl.reports.explain.text import head, largest_values

_WIDTH = 120


def fits(program: SpmdProgram, topology: Topology, compiled: Compiled | None) -> bool:
    """Returns whether the program fits: by the compiler, or by the plan without a compiler."""
    return compiled.fits if compiled else program.peak_bytes <= topology.memory_bytes


def report(
    program: SpmdProgram,
    explanation: Explanation,
    topology: Topology,
    compiled: Compiled | None,
    flags: Sequence[str],
    others: Mapping[str, Compiled] = MappingProxyType({}),
) -> str:
    """Returns the text: `report(program, explain(program, "v5p"), topology, compiled, flags)`.

    Args:
        explanation: of the same program on the hardware of the topology.
        compiled: the compiler's figures; None for machines whose compiler is not installed.
        flags: the compiler's, as they are written.
        others: other programs for the same machine, by what to call them.
    """
    sections = [
        [*head(explanation), _how(topology, compiled)],
        _memory(program, explanation, topology, compiled, others),
        _wire(planned(program), compiled, others),
        time_of_step(
            explanation.timeline,
            explanation.simulated,
            compiled,
            others,
            program.pipeline.axes if program.pipeline is not None else (),
        ),
        _flags(flags, compiled),
    ]
    return "\n\n".join("\n".join(section) for section in sections if section)


def _how(topology: Topology, compiled: Compiled | None) -> str:
    if compiled is None:
        return (
            f"{topology}: planned only; GPU programs are compiled where the GPUs are, so nothing "
            "below is a compiler's word"
        )
    took = f"{show_seconds(compiled.seconds)}, {show_seconds(compiled.processor_seconds)}"
    return f"{topology}: compiled in {took} of processor time"


def _memory(
    program: SpmdProgram,
    explanation: Explanation,
    topology: Topology,
    compiled: Compiled | None,
    others: Mapping[str, Compiled],
) -> list[str]:
    room = topology.memory_bytes
    if compiled is not None and compiled.room_bytes is not None:
        room = compiled.room_bytes
    good = fits(program, topology, compiled)
    verdict = "fits" if good else "does not fit"
    lines = [f"{verdict}: a device has {show_bytes(room)}"]
    rows = [("by the plan", show_bytes(program.peak_bytes), "")]
    if compiled is not None:
        share = f"the plan has {program.peak_bytes / compiled.peak_bytes:.2f} times as much"
        what = share if compiled.fits else f"{share}; the compiler gave up"
        rows.append(("by the compiler", show_bytes(compiled.peak_bytes), what))
    for name, other in others.items():
        what = "" if other.fits else "it does not fit"
        rows.append((name, show_bytes(other.peak_bytes), what))
    lines += table(rows, right=(1,))
    if not good:
        lines += largest_values(explanation)
        lines += wrapped("  to use less: ", explanation.advice, _WIDTH)
    return lines


def _wire(
    plan: Mapping[str, float], compiled: Compiled | None, others: Mapping[str, Compiled]
) -> list[str]:
    compiler = compiled.sent if compiled is not None else None
    known = {name: other.sent for name, other in others.items() if other.sent is not None}
    if not plan and not compiler and not any(known.values()):
        return ["on the wire: nothing; no device needs what another has"]
    programs = [plan, compiler or {}, *known.values()]
    kinds = [kind for kind in COLLECTIVES if any(kind in sent for sent in programs)]
    sums = [*((kind, plan.get(kind, 0.0)) for kind in kinds), ("total", math.fsum(plan.values()))]
    rows: list[tuple[str, ...]]
    if compiler is None:
        rows = [("", "plan"), *((kind, show_bytes(ours)) for kind, ours in sums)]
    else:
        theirs = [*(compiler.get(kind, 0.0) for kind in kinds), math.fsum(compiler.values())]
        rows = [("", "plan", "compiler", "compiler/plan", *known)]
        for (kind, ours), sent in zip(sums, theirs, strict=True):
            share = f"{sent / ours:.3f}" if ours else ""
            peers = [_of_kind(kind, other) for other in known.values()]
            rows.append((kind, show_bytes(ours), show_bytes(sent), share, *peers))
    lines = ["on the wire, per device and step", *table(rows, right=range(1, len(rows[0])))]
    if compiled is not None and compiled.unread:
        lines += wrapped("  by the compiler: not known; ", compiled.unread, _WIDTH)
    return lines


def _of_kind(kind: str, sent: Mapping[str, float]) -> str:
    return show_bytes(math.fsum(sent.values()) if kind == "total" else sent.get(kind, 0.0))


def _flags(flags: Sequence[str], compiled: Compiled | None) -> list[str]:
    used = "compiler flags" if compiled is not None else "compiler flags, where it is compiled"
    return [f"{used}:", *(f"  {flag}" for flag in flags)] if flags else [f"{used}: none"]
