"""Schedule: collectives start early, so that they overlap with computation.

Lowering writes a collective where its result is first read. This pass moves reductions, and other
collectives of computed values, to where their operands are ready. It moves a gather before the last
product, or loop, that precedes its first reader: one of these hides it, and the gathered value is
live no longer than needed. Instructions that only move or cast operands move along. Readers stay.
XLA orders instructions again for TPU and GPU. Reports, and backends that run a program as it is
written, use this order.
"""

from __future__ import annotations

import bisect
from collections.abc import Collection, Mapping
from dataclasses import replace

from meshdsl.lowering.instructions import kinds_with
from meshdsl.lowering.options import Options
from meshdsl.lowering.passes.blocks import CHEAP, each_block, in_order, ready
from meshdsl.lowering.program import COLLECTIVES, Block, Instruction, SpmdProgram, Value

_LONG = kinds_with(lambda kind: kind.long)


def schedule(program: SpmdProgram, options: Options) -> SpmdProgram:
    """Moves collectives to where they can start, gathers only as far as it pays.

    If the peak would grow, and exceed `options.memory` if that is given, gathers stay in place; if
    it still would, all collectives do.
    """
    allowed = max(program.peak_bytes, options.memory or 0)
    for kinds in (COLLECTIVES, [kind for kind in COLLECTIVES if kind != "all_gather"]):
        early = each_block(program, lambda block, kinds=kinds: _early(block, kinds))  # type: ignore[misc]
        if early is program:
            return program
        if early.peak_bytes <= allowed:
            return schedule(early, options)  # moved collectives may let others move
    return program


def _early(block: Block, kinds: Collection[str]) -> Block:
    place = {one: n for n, one in enumerate(block.instructions)}
    maker = {value: one for one in block.instructions for value in one.outputs}
    first = _first_readers(block, place, maker)
    long = [n for one, n in place.items() if one.op in _LONG]
    priority: dict[Instruction, float] = dict(place)
    earlier = False
    for one in block.instructions:
        if one.op not in kinds:
            continue
        moved, begin = ready(one, maker, priority)  # equals come in the order given
        if one.op == "all_gather":
            before = bisect.bisect_left(long, first.get(one, len(block.instructions)))
            begin = max(begin, long[before - 1] - 0.5) if before else place[one]
        if begin < place[one]:
            earlier = True
            priority[one] = begin
            for each in moved:
                priority[each] = min(priority[each], begin)
    if not earlier:
        return block
    instructions = in_order(block.instructions, priority)
    return (
        block if instructions == block.instructions else replace(block, instructions=instructions)
    )


def _first_readers(
    block: Block, place: Mapping[Instruction, int], maker: Mapping[Value, Instruction]
) -> dict[Instruction, int]:
    """Returns the position of each instruction's first reader that does not move itself.

    Gathers move, and so do cheap instructions that only lead to gathers; the readers of a moving
    reader count instead of it.
    """
    first: dict[Instruction, int] = {}
    stays: set[Instruction] = set(maker[value] for value in block.outputs if value in maker)
    for one in reversed(block.instructions):
        moves = one.op == "all_gather" or (one.op in CHEAP and one not in stays)
        at = first.get(one, place[one]) if moves else place[one]
        for value in one.inputs:
            if value in maker:
                before = maker[value]
                first[before] = min(first.get(before, at), at)
                if not moves:
                    stays.add(before)
    return first
