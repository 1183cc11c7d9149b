"""Tidy: removes duplicate instructions, and those that no result or effect needs.

Equal instructions of the same values are done once in a block. A barrier's results count as other
values than its operands, so recomputed values, and values gathered again, are no duplicates.
Effects are not removed.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace

import numpy as np

from meshdsl.lowering.options import Options
from meshdsl.lowering.passes.blocks import each_block, substituted
from meshdsl.lowering.program import EFFECTS, Block, Instruction, SpmdProgram, Value, exact_key


def tidy(program: SpmdProgram, options: Options) -> SpmdProgram:
    """Removes duplicates, and instructions that neither a result nor an effect needs."""
    return each_block(program, lambda block: needed(_once(block)))


def _once(block: Block) -> Block:
    if not _repeats(block):
        return block
    known: dict[Hashable, tuple[Value, ...]] = {}
    same: dict[Value, Value] = {}
    remaining = []
    for instruction in block.instructions:
        if same:
            instruction = substituted(instruction, same)
        key = _key(instruction)
        before = known.get(key) if key is not None else None
        if before is not None:
            same.update(zip(instruction.outputs, before, strict=True))
            continue
        if key is not None:
            known[key] = instruction.outputs
        remaining.append(instruction)
    if not same:
        return block
    outputs = tuple(same.get(value, value) for value in block.outputs)
    return replace(block, instructions=tuple(remaining), outputs=outputs)


def _repeats(block: Block) -> bool:
    """Whether two instructions are equal; in most blocks, no two of a kind have equal operands."""
    alike: dict[Hashable, list[Instruction]] = {}
    for instruction in block.instructions:
        alike.setdefault((instruction.op, instruction.inputs), []).append(instruction)
    if len(alike) == len(block.instructions):
        return False
    keys = [_key(one) for some in alike.values() if len(some) > 1 for one in some]
    known = [key for key in keys if key is not None]
    return len(set(known)) < len(known)


def _key(instruction: Instruction) -> Hashable | None:
    """Returns a key that equal instructions share, or None if an instruction has no equal."""
    op, params = instruction.op, instruction.params
    if op in EFFECTS or op == "barrier" or instruction.bodies:
        return None
    results = tuple([(value.shape, value.dtype, value.layout) for value in instruction.outputs])
    if not params:  # as of most instructions
        return op, instruction.inputs, results
    for value in params.values():
        if isinstance(value, np.ndarray | dict):
            return None
    return op, instruction.inputs, results, exact_key(params)


def needed(block: Block) -> Block:
    """Returns a block without instructions that neither its results nor effects need."""
    read = set(block.outputs)
    remaining = []
    for instruction in reversed(block.instructions):
        if not read.isdisjoint(instruction.outputs) or instruction.has_effect:
            read.update(instruction.inputs)
            remaining.append(instruction)
    if len(remaining) == len(block.instructions):
        return block
    return replace(block, instructions=tuple(reversed(remaining)))
