"""Bucket: collectives that do not depend on each other become one.

Each collective costs the time until the first byte arrives, whatever it sends; so those of one op,
dtype and kind, over the same axes, in the same block, are joined. All that is as many such
collectives away from the block's inputs is joined, which leaves the fewest: as many as the longest
chain in which each needs the one before. A joined reduction stands where the last of its operands
is ready. A joined gather stands where the first of its results was asked for, if by then all that
it gathers is ready, or can be made ready by moving and casting what the block is given; else where
the last is ready. No bucket reaches across the border of a loop, and the permutes of rings that run
beside products (`overlap`) go each at its own time. What a checkpoint computes again is not joined
with the forward pass, nor with what another checkpoint computes again: it would be computed, and
held, before it is needed.
"""

from __future__ import annotations

import collections
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import replace

from meshdsl.layouts.mesh import Mesh
from meshdsl.lowering.options import Options
from meshdsl.lowering.parameters import OverAxes, parameters_of
from meshdsl.lowering.passes.blocks import computed_again, each_block, in_order, ready
from meshdsl.lowering.program import (
    Block,
    Instruction,
    SpmdProgram,
    Value,
    exact,
    joined,
    payload_bytes,
    shared,
)


def bucket(program: SpmdProgram, options: Options) -> SpmdProgram:
    """Joins collectives into buckets of at most `options.bucket_bytes` of payload.

    A collective that is larger than that stays alone. Where `options.memory` is given and buckets
    would take the peak above it, and above what it is without them, they are made smaller until
    they do not, by halves.
    """
    limit, rings = options.bucket_bytes, options.overlap
    if limit == 0:
        return program
    found = _with_buckets(program, limit, rings)
    if options.memory is None or found is program:
        return found
    allowed = max(options.memory, program.peak_bytes)
    while found.peak_bytes > allowed:
        largest = max(one.payload_bytes for one in found.collectives if one.parts)
        found = _with_buckets(program, largest // 2, rings)
        if found is program:
            break
    return found


def _with_buckets(program: SpmdProgram, limit: int | None, rings: bool) -> SpmdProgram:
    return each_block(program, lambda block: _joined(block, program.mesh, limit, rings))


def _joined(block: Block, mesh: Mesh, limit: int | None, rings: bool) -> Block:
    alike: dict[Hashable, set[Instruction]] = collections.defaultdict(set)
    for one in block.instructions:
        if one.is_collective and not (rings and one.op == "permute"):
            alike[_key(one)].add(one)
    instructions, replays = block.instructions, computed_again(block)
    for chosen in alike.values():
        if len(chosen) > 1:
            instructions = _of_one_key(instructions, chosen, replays, mesh, limit)
    if instructions is block.instructions:
        return block
    return replace(block, instructions=instructions)


def _key(one: Instruction) -> Hashable:
    """Returns what collectives have in common that can be one."""
    axes, (first, *_) = parameters_of(one, OverAxes)["axes"], one.inputs
    if one.op == "all_reduce":
        axes = tuple(sorted(axes))
    rest = {name: value for name, value in shared(one).items() if name != "axes"}
    return one.op, axes, first.dtype, exact(rest)


def _of_one_key(
    instructions: tuple[Instruction, ...],
    chosen: Collection[Instruction],
    replays: Mapping[Instruction, Instruction],
    mesh: Mesh,
    limit: int | None,
) -> tuple[Instruction, ...]:
    """Joins the collectives of one key."""
    levels = _levels(instructions, chosen)
    parts = [part for level in levels for part in _by_replay(level, replays)]
    groups = [group for part in parts for group in _within(part, mesh, limit)]
    groups = [group for group in groups if len(group) > 1]
    if not groups:
        return instructions
    place = {one: n for n, one in enumerate(instructions)}
    maker = {value: one for one in instructions for value in one.outputs}
    priority: dict[Instruction, float] = dict(place)
    gone = {one for group in groups for one in group}
    found = [one for one in instructions if one not in gone]
    for group in groups:
        bucket = joined(group, mesh)
        found.append(bucket)
        priority[bucket] = place[group[-1]]
        if bucket.op == "all_gather":
            moved, last = ready(bucket, maker, place)
            priority[bucket] = max(place[group[0]], last + 0.5)
            for one in moved:
                priority[one] = min(priority[one], priority[bucket] - 0.25)
    return in_order(found, priority)


def _levels(
    instructions: Sequence[Instruction], chosen: Collection[Instruction]
) -> list[list[Instruction]]:
    """Returns the chosen instructions by how many of them each comes after."""
    depth: dict[Value, int] = {}  # of what comes after some; of all else it is 0
    levels: list[list[Instruction]] = []
    effect = 0
    for one in instructions:
        here = max([depth[value] for value in one.inputs if value in depth], default=0)
        if one.has_effect:
            effect = here = max(here, effect)
        if one in chosen:
            levels += [[] for _ in range(here + 1 - len(levels))]
            levels[here].append(one)
            here += 1
        if here:
            depth.update(dict.fromkeys(one.outputs, here))
    return levels


def _by_replay(
    level: Sequence[Instruction], replays: Mapping[Instruction, Instruction]
) -> list[list[Instruction]]:
    """Returns a level in parts that may be joined: one for each checkpoint that replays in it.

    What the backward pass sends goes with the last of these, what the forward pass sends is apart.
    """
    found: dict[Instruction, list[Instruction]] = {
        replays[one]: [] for one in level if one in replays
    }
    if not found:
        return [list(level)]
    *_, last = found
    forward: list[Instruction] = []
    for one in level:
        if one in replays:
            found[replays[one]].append(one)
        else:
            (found[last] if one.source.backward else forward).append(one)
    return [part for part in (forward, *found.values()) if part]


def _within(
    group: Sequence[Instruction], mesh: Mesh, limit: int | None
) -> Iterator[list[Instruction]]:
    """Yields a group in parts of at most `limit` bytes, or of one instruction."""
    part: list[Instruction] = []
    total = 0
    for one in group:
        size = payload_bytes(one, mesh)
        if part and limit is not None and total + size > limit:
            yield part
            part, total = [], 0
        part.append(one)
        total += size
    yield part
