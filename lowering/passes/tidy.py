"""Tidy: removes duplicate instructions, and those that no result or effect needs.

Equal instructions of the same values are done once in a block. A barrier's results count as other
values than its operands, so values that are to be recomputed or gathered again stay. Effects stay.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace

import numpy as np

from meshdsl.lowering.options import Options
from meshdsl.lowering.passes.blocks import each_block, substituted
from meshdsl.lowering.program import Block, Instruction, SpmdProgram, Value, exact_key


def tidy(program: SpmdProgram, options: Options) -> SpmdProgram:
    """Removes duplicates, and instructions that neither a result nor an effect needs."""
    return each_block(program, lambda block: needed(_once(block)))


def _once(block: Block) -> Block:
    known: dict[Hashable, tuple[Value, ...]] = {}
    same: dict[Value, Value] = {}
    remaining = []
    for one in block.instructions:
        one = substituted(one, same)
        key = _key(one)
        before = known.get(key) if key is not None else None
        if before is not None:
            same.update(zip(one.outputs, before, strict=True))
            continue
        if key is not None:
            known[key] = one.outputs
        remaining.append(one)
    if not same:
        return block
    outputs = tuple(same.get(value, value) for value in block.outputs)
    return replace(block, instructions=tuple(remaining), outputs=outputs)


def _key(one: Instruction) -> Hashable | None:
    """Returns a key that equal instructions share, or None if an instruction has no equal."""
    if one.has_effect or one.op == "barrier":
        return None
    if any(isinstance(value, np.ndarray | Block | dict) for value in one.params.values()):
        return None
    results = tuple((value.shape, value.dtype, value.layout) for value in one.outputs)
    return one.op, one.inputs, results, exact_key(one.params)


def needed(block: Block) -> Block:
    """Returns a block without instructions that neither its results nor effects need."""
    read = set(block.outputs)
    remaining = []
    for one in reversed(block.instructions):
        if one.has_effect or any(value in read for value in one.outputs):
            read.update(one.inputs)
            remaining.append(one)
    if len(remaining) == len(block.instructions):
        return block
    return replace(block, instructions=tuple(reversed(remaining)))
