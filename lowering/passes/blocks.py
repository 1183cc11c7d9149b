"""Blocks under change: what every pass needs to rewrite instructions and put them in order.

A block's instructions may be put in any order in which each comes after those that make what it
reads. Effects, such as prints, keep theirs.
"""

from __future__ import annotations

import heapq
import operator
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from meshdsl.lowering.instructions import named
from meshdsl.lowering.program import Block, Instruction, SpmdProgram, Value

CHEAP = named(lambda kind: kind.cheap)


def each_block(program: SpmdProgram, change: Callable[[Block], Block]) -> SpmdProgram:
    """Returns a program with all blocks changed, those inside of others first.

    `each_block(program, lambda block: block)` is the program itself: what does not change is kept.
    """
    block = _changed(program.block, change)
    return program if block is program.block else replace(program, block=block)


def _changed(block: Block, change: Callable[[Block], Block]) -> Block:
    found = []
    for instruction in block.instructions:
        if instruction.bodies:
            bodies = {
                name: _changed(body, change)
                for name, body in instruction.params.items()
                if isinstance(body, Block)
            }
            if any(body is not instruction.params[name] for name, body in bodies.items()):
                instruction = replace(instruction, params={**instruction.params, **bodies})
        found.append(instruction)
    if not all(map(operator.is_, found, block.instructions)):
        block = replace(block, instructions=tuple(found))
    return change(block)


def in_order(
    instructions: Iterable[Instruction], priority: Mapping[Instruction, float]
) -> tuple[Instruction, ...]:
    """Returns instructions in an order in which each can run: of those that can, the least first.

    Args:
        instructions: each makes what none of the others makes; given in any order, but for effects,
            whose order is kept.
        priority: when each should come, if what it reads is there by then; as a rule its place in
            the block. Equals come in the order given.
    """
    given = list(instructions)
    effects = [one for one in given if one.has_effect]
    before = dict(zip(effects[1:], effects, strict=False))
    missing: set[Value | Instruction] = {value for one in given for value in one.outputs}
    missing.update(effects)
    waiting: dict[Value | Instruction, list[int]] = defaultdict(list)
    late: list[tuple[float, int]] = []  # can run, though their turn was before
    found: list[Instruction] = []

    def wait(n: int) -> bool:
        """Notes for what an instruction waits, if it does: for one of the things at a time."""
        one = given[n]
        needs = (*one.inputs, before[one]) if one in before else one.inputs
        if missing.isdisjoint(needs):
            return False
        waiting[next(need for need in needs if need in missing)].append(n)
        return True

    def put(n: int) -> None:
        one = given[n]
        found.append(one)
        made: tuple[Value | Instruction, ...] = (*one.outputs, one)
        missing.difference_update(made)
        if waiting:
            for follower in [other for each in made for other in waiting.pop(each, [])]:
                if not wait(follower):
                    heapq.heappush(late, (priority[given[follower]], follower))

    for n in sorted(range(len(given)), key=[priority[one] for one in given].__getitem__):
        if not wait(n):
            put(n)
        while late:
            put(heapq.heappop(late)[1])
    assert len(found) == len(given), "instructions that need each other"
    return tuple(found)


def computed_again(block: Block) -> dict[Instruction, Instruction]:
    """Returns what checkpoints compute again in a block, with the last barrier before each.

    A replay starts at a barrier; its instructions are of the forward pass, while gradients, which
    read what it computes, are of the backward pass.
    """
    place: dict[Instruction, int] = {}
    barriers: dict[Value, Instruction] = {}
    found: dict[Instruction, Instruction] = {}
    for one in block.instructions:
        if one.op == "barrier":
            place[one] = len(place)
            barriers.update(dict.fromkeys(one.outputs, one))
            continue
        before = [barriers[value] for value in one.inputs if value in barriers]
        if before and not one.source.backward:
            found[one] = max(before, key=place.__getitem__)
            barriers.update(dict.fromkeys(one.outputs, found[one]))
    return found


def ready(
    one: Instruction, maker: Mapping[Value, Instruction], place: Mapping[Instruction, float]
) -> tuple[list[Instruction], float]:
    """Returns what leads to an instruction and can be done with it, and the place of what cannot.

    What only moves or casts can be done at any time. The place is that of the last of the others
    that must be there first; -1 if there is none.

    Args:
        maker: which instruction of the block makes a value.
        place: where each stands in the block.
    """
    moved: dict[Instruction, None] = {}
    last = -1.0
    waiting = [maker[value] for value in one.inputs if value in maker]
    while waiting:
        before = waiting.pop()
        if before.op not in CHEAP:
            last = max(last, place[before])
        elif before not in moved:
            moved[before] = None
            waiting += [maker[value] for value in before.inputs if value in maker]
    return list(moved), last


def substituted(
    instruction: Instruction, values: Mapping[Value, Value], outputs: Sequence[Value] | None = None
) -> Instruction:
    """Returns an instruction that reads other values where `values` tells so."""
    if outputs is None and values.keys().isdisjoint(instruction.inputs):
        return instruction
    inputs = tuple(values.get(value, value) for value in instruction.inputs)
    return replace(instruction, inputs=inputs, outputs=tuple(outputs or instruction.outputs))
