"""Schedule: collectives start early, so that they overlap with computation.

Lowering writes a collective where its result is first read. This pass moves reductions, and other
collectives of computed values, to where their operands are ready. It moves a gather before the last
product, or loop, that precedes its first reader: one of these hides it, and the gathered value is
live no longer than needed. Instructions that only move or cast operands move along; readers do not.
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
from meshdsl.lowering.program import COLLECTIVES, Block, Instruction, SpmdProgram

_LONG = kinds_with(lambda kind: kind.long)


def schedule(program: SpmdProgram, options: Options) -> SpmdProgram:
    """Moves collectives to where they can start, gathers only as far as it pays.

    If the peak would grow, and exceed `options.memory` if that is given, gathers are not moved; if
    it still would, no collective is.
    """
    for kinds in (COLLECTIVES, [kind for kind in COLLECTIVES if kind != "all_gather"]):
        early = each_block(program, lambda block, kinds=kinds: _early(block, kinds))  # type: ignore[misc]
        if early is program:
            return program
        peak = early.peak_bytes
        if peak <= (options.memory or 0) or peak <= program.peak_bytes:
            return schedule(early, options)  # moved collectives may let others move
    return program


def _early(block: Block, kinds: Collection[str]) -> Block:
    moving = [instruction for instruction in block.instructions if instruction.op in kinds]
    if not moving:
        return block
    position = {instruction: n for n, instruction in enumerate(block.instructions)}
    maker = {
        value: instruction for instruction in block.instructions for value in instruction.outputs
    }
    gathers = any(instruction.op == "all_gather" for instruction in moving)
    readers = _first_readers(block, position) if gathers else {}
    long = [n for instruction, n in position.items() if instruction.op in _LONG]
    priority: dict[Instruction, float] = dict(position)
    first, end = len(block.instructions), 0  # what moves is between these
    for instruction in moving:
        moved, begin = ready(instruction, maker, priority)  # equals come in the order given
        if instruction.op == "all_gather":
            before = bisect.bisect_left(long, readers.get(instruction, len(block.instructions)))
            begin = max(begin, long[before - 1] - 0.5) if before else position[instruction]
        if begin < position[instruction]:
            first, end = min(first, int(begin)), max(end, position[instruction] + 1)
            priority[instruction] = begin
            for companion in moved:
                priority[companion] = min(priority[companion], begin)
    first = max(first, 0)
    if end <= first:
        return block
    given = block.instructions
    ordered = in_order(given[first:end], priority)
    if ordered == given[first:end]:
        return block
    return replace(block, instructions=(*given[:first], *ordered, *given[end:]))


def _first_readers(block: Block, position: Mapping[Instruction, int]) -> dict[Instruction, int]:
    """Returns the position of each gather's first reader that is not moved itself.

    Gathers are moved, and so are cheap instructions that only gathers read; instead of a reader
    that is moved, its own readers count.
    """
    may_move = {"all_gather"} | CHEAP
    moved = {v: i for i in block.instructions if i.op in may_move for v in i.outputs}
    first: dict[Instruction, int] = {}
    not_moved: set[Instruction] = {moved[value] for value in block.outputs if value in moved}
    for instruction in reversed(block.instructions):
        here = position[instruction]
        is_moved = instruction.op in may_move and (
            instruction.op == "all_gather" or instruction not in not_moved
        )
        first_read = first.get(instruction, here) if is_moved else here
        for value in instruction.inputs:
            before = moved.get(value)
            if before is not None:
                if first.setdefault(before, first_read) > first_read:
                    first[before] = first_read
                if not is_moved:
                    not_moved.add(before)
    return first
