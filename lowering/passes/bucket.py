"""Bucket: collectives that do not depend on each other become one.

Each collective costs a latency, whatever it sends. So collectives of one op, dtype and kind, over
the same axes and in the same block, are joined: those with equally many such collectives before
them. Groups are joined one after the other, until nothing can be joined. Without a limit of bytes
(`bucket_bytes`), a group becomes as few as its longest chain of dependent collectives when its turn
comes.

- A joined reduction is written where the last of its operands is ready.
- A joined gather is written where the first of its results is read, if all operands are ready by
  then, or can be made ready by moving and casting inputs of the block; else where the last operand
  is ready.
- Collectives of different blocks are not joined.
- Permutes of rings beside products (`overlap`) are not joined: each has its own time.
- Collectives of a recomputation are joined neither with the forward pass nor with another
  recomputation: they would run, and occupy memory, before they are needed.
"""

from __future__ import annotations

import collections
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import replace

from meshdsl.layouts.mesh import Mesh
from meshdsl.lowering.options import Options
from meshdsl.lowering.parameters import axes_of
from meshdsl.lowering.passes.blocks import computed_again, each_block, in_order, ready
from meshdsl.lowering.program import (
    COLLECTIVES,
    EFFECTS,
    Block,
    Instruction,
    SpmdProgram,
    Value,
    exact_key,
    joined,
    payload_bytes,
    shared_parameters,
)


def bucket(program: SpmdProgram, options: Options) -> SpmdProgram:
    """Joins collectives into buckets of at most `options.bucket_bytes` of payload.

    A larger collective is not joined. If buckets raise the peak above `options.memory` and above
    the peak without them, their limit is halved until they do not.
    """
    limit, rings = options.bucket_bytes, options.overlap
    if limit == 0:
        return program
    bucketed = _with_buckets(program, limit, rings)
    if options.memory is None or bucketed is program:
        return bucketed
    allowed = max(options.memory, program.peak_bytes)
    while bucketed.peak_bytes > allowed:
        largest = max(c.payload_bytes for c in bucketed.collectives if c.parts)
        bucketed = _with_buckets(program, largest // 2, rings)
        if bucketed is program:
            break
    return bucketed


def _with_buckets(program: SpmdProgram, limit: int | None, rings: bool) -> SpmdProgram:
    return each_block(program, lambda block: _all_joined(block, program.mesh, limit, rings))


def _all_joined(block: Block, mesh: Mesh, limit: int | None, rings: bool) -> Block:
    # A bucket depends on all that its parts depend on. So buckets of one group can bring two
    # collectives of a group before it to the same place in their chain.
    while (after := _joined(block, mesh, limit, rings)) is not block:
        block = after
    return block


def _joined(block: Block, mesh: Mesh, limit: int | None, rings: bool) -> Block:
    alike: dict[Hashable, set[Instruction]] = collections.defaultdict(set)
    for instruction in block.instructions:
        if instruction.op in COLLECTIVES and not (rings and instruction.op == "permute"):
            alike[_key(instruction)].add(instruction)
    instructions, replays = block.instructions, computed_again(block)
    for chosen in alike.values():
        if _may_join(chosen, mesh, limit):
            instructions = _of_one_key(instructions, chosen, replays, mesh, limit)
    if instructions is block.instructions:
        return block
    return replace(block, instructions=instructions)


def _may_join(chosen: Collection[Instruction], mesh: Mesh, limit: int | None) -> bool:
    """Whether a bucket has room for two of some collectives."""
    if len(chosen) < 2 or limit is None:
        return len(chosen) > 1
    smallest, second, *_ = sorted(payload_bytes(collective, mesh) for collective in chosen)
    return smallest + second <= limit


def _key(collective: Instruction) -> Hashable:
    """Returns a key that is equal for collectives that can be joined."""
    axes, (first, *_) = axes_of(collective), collective.inputs
    if collective.op == "all_reduce":
        axes = tuple(sorted(axes))
    rest = {name: value for name, value in shared_parameters(collective).items() if name != "axes"}
    return collective.op, axes, first.dtype, exact_key(rest)


def _of_one_key(
    instructions: tuple[Instruction, ...],
    chosen: Collection[Instruction],
    replays: Mapping[Instruction, Instruction],
    mesh: Mesh,
    limit: int | None,
) -> tuple[Instruction, ...]:
    """Joins the collectives of one key."""
    # Nothing moves before the first of them, or behind the last.
    within = [n for n, instruction in enumerate(instructions) if instruction in chosen]
    first, end = within[0], within[-1] + 1
    levels = _levels(instructions[first:end], chosen)
    parts = [part for level in levels for part in _by_replay(level, replays)]
    groups = [group for part in parts for group in _within(part, mesh, limit)]
    groups = [group for group in groups if len(group) > 1]
    if not groups:
        return instructions
    replaced = {instruction for group in groups for instruction in group}
    within = [n for n in within if instructions[n] in replaced]
    first, end = within[0], within[-1] + 1
    moving = instructions[first:end]
    position = {instruction: n for n, instruction in enumerate(moving)}
    maker = {value: instruction for instruction in moving for value in instruction.outputs}
    priority: dict[Instruction, float] = dict(position)
    remaining = [instruction for instruction in moving if instruction not in replaced]
    for group in groups:
        bucket = joined(group, mesh)
        remaining.append(bucket)
        priority[bucket] = position[group[-1]]
        if bucket.op == "all_gather":
            moved, last = ready(bucket, maker, position)
            priority[bucket] = max(position[group[0]], last + 0.5)
            for instruction in moved:
                priority[instruction] = min(priority[instruction], priority[bucket] - 0.25)
    return (*instructions[:first], *in_order(remaining, priority), *instructions[end:])


def _levels(
    instructions: Sequence[Instruction], chosen: Collection[Instruction]
) -> list[list[Instruction]]:
    """Returns the chosen instructions by the number of chosen instructions before each."""
    # The number of chosen instructions in the longest chain up to a value; if not 0.
    depth: dict[Value, int] = {}
    levels: list[list[Instruction]] = []
    effect = 0
    for instruction in instructions:
        level = 0
        for value in instruction.inputs:
            if value in depth and depth[value] > level:
                level = depth[value]
        if instruction.op in EFFECTS or (instruction.bodies and instruction.has_effect):
            effect = level = max(level, effect)
        if instruction in chosen:
            levels += [[] for _ in range(level + 1 - len(levels))]
            levels[level].append(instruction)
            level += 1
        if level:
            for value in instruction.outputs:
                depth[value] = level
    return levels


def _by_replay(
    level: Sequence[Instruction], replays: Mapping[Instruction, Instruction]
) -> list[list[Instruction]]:
    """Returns the parts of a level that may be joined: one for each recomputation.

    Collectives of the backward pass join the last of these; those of the forward pass are apart.
    """
    by_barrier: dict[Instruction, list[Instruction]] = {
        replays[instruction]: [] for instruction in level if instruction in replays
    }
    if not by_barrier:
        return [list(level)]
    *_, last = by_barrier
    forward: list[Instruction] = []
    for instruction in level:
        if instruction in replays:
            by_barrier[replays[instruction]].append(instruction)
        else:
            (by_barrier[last] if instruction.source.backward else forward).append(instruction)
    return [part for part in (forward, *by_barrier.values()) if part]


def _within(
    group: Sequence[Instruction], mesh: Mesh, limit: int | None
) -> Iterator[list[Instruction]]:
    """Yields the parts of a group: each of at most `limit` bytes, or of one instruction."""
    part: list[Instruction] = []
    total = 0
    for collective in group:
        size = payload_bytes(collective, mesh)
        if part and limit is not None and total + size > limit:
            yield part
            part, total = [], 0
        part.append(collective)
        total += size
    yield part
