"""Rewriting of blocks: functions with which passes replace and reorder instructions.

Instructions may be in any order in which each follows those that make its operands. Effects, such
as prints, keep their order.
"""

from __future__ import annotations

import heapq
import operator
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from meshdsl.lowering.instructions import kinds_with
from meshdsl.lowering.program import EFFECTS, Block, Instruction, SpmdProgram, Value, exact_key

CHEAP = kinds_with(lambda kind: kind.cheap)


def each_block(program: SpmdProgram, change: Callable[[Block], Block]) -> SpmdProgram:
    """Returns a program with all blocks changed, inner blocks first.

    It is the program itself if no block changes: `each_block(program, lambda block: block)`.
    """
    block = _changed(program.block, change)
    return program if block is program.block else replace(program, block=block)


def _changed(block: Block, change: Callable[[Block], Block]) -> Block:
    if not any([instruction.bodies for instruction in block.instructions]):
        return change(block)  # as most are
    instructions = []
    for instruction in block.instructions:
        if instruction.bodies:
            bodies = {
                name: _changed(body, change)
                for name, body in instruction.params.items()
                if isinstance(body, Block)
            }
            if any(body is not instruction.params[name] for name, body in bodies.items()):
                instruction = replace(instruction, params={**instruction.params, **bodies})
        instructions.append(instruction)
    if not all(map(operator.is_, instructions, block.instructions)):
        block = replace(block, instructions=tuple(instructions))
    return change(block)


def in_order(
    instructions: Iterable[Instruction], priority: Mapping[Instruction, float]
) -> tuple[Instruction, ...]:
    """Returns instructions in an order in which each can run, by priority as far as possible.

    Args:
        instructions: in any order; effects keep their order. No two make the same value.
        priority: the position that each should have if its operands are ready by then, usually its
            position in the block. Equals keep their order.
    """
    given = list(instructions)
    effects = [each for each in given if each.op in EFFECTS or (each.bodies and each.has_effect)]
    before = dict(zip(effects[1:], effects, strict=False))
    # Values and effects that instructions may wait for, until they are ordered.
    missing: set[Value | Instruction] = {
        value for instruction in given for value in instruction.outputs
    }
    missing.update(effects)
    waiting: dict[Value | Instruction, list[int]] = defaultdict(list)
    late: list[tuple[float, int]] = []  # heap of ready instructions whose turn has passed
    ordered: list[Instruction] = []

    def wait(n: int) -> bool:
        """Registers an instruction with a missing need, if it has one; returns whether it has."""
        instruction = given[n]
        needs: tuple[Value | Instruction, ...] = instruction.inputs
        if before and instruction in before:
            needs = (*needs, before[instruction])
        if missing.isdisjoint(needs):
            return False
        waiting[next(need for need in needs if need in missing)].append(n)
        return True

    def put(n: int) -> None:
        instruction = given[n]
        ordered.append(instruction)
        made: tuple[Value | Instruction, ...] = instruction.outputs
        if effects:
            made = (*made, instruction)
        missing.difference_update(made)
        if not waiting.keys().isdisjoint(made):
            for follower in [other for need in made for other in waiting.pop(need, [])]:
                if not wait(follower):
                    heapq.heappush(late, (priority[given[follower]], follower))

    for n in sorted(
        range(len(given)), key=[priority[instruction] for instruction in given].__getitem__
    ):
        if not effects and not waiting and missing.isdisjoint(given[n].inputs):
            ordered.append(given[n])  # as most are
            missing.difference_update(given[n].outputs)
            continue
        if not wait(n):
            put(n)
        while late:
            put(heapq.heappop(late)[1])
    assert len(ordered) == len(given), "instructions that need each other"
    return tuple(ordered)


def computed_again(block: Block) -> dict[Instruction, Instruction]:
    """Returns the instructions that are recomputed, with the last barrier before each.

    A replay starts at a barrier. Its instructions are of the forward pass; the gradients that read
    them are of the backward pass.
    """
    position: dict[Instruction, int] = {}
    barriers: dict[Value, Instruction] = {}
    replays: dict[Instruction, Instruction] = {}
    for instruction in block.instructions:
        if instruction.op == "barrier":
            position[instruction] = len(position)
            barriers.update(dict.fromkeys(instruction.outputs, instruction))
            continue
        if instruction.source.backward:
            continue
        before = [barriers[value] for value in instruction.inputs if value in barriers]
        if before:
            replays[instruction] = max(before, key=position.__getitem__)
            barriers.update(dict.fromkeys(instruction.outputs, replays[instruction]))
    return replays


def ready(
    instruction: Instruction,
    maker: Mapping[Value, Instruction],
    position: Mapping[Instruction, float],
) -> tuple[list[Instruction], float]:
    """Returns the cheap instructions that an instruction needs, and when its other needs are ready.

    Cheap instructions only move or cast: they can move together with the instruction. The second
    result is the position of the last instruction it needs that is not cheap; -1 if there is none.

    Args:
        maker: the instruction of the block that makes a value.
        position: the position of each instruction in the block.
    """
    moved: dict[Instruction, None] = {}
    last = -1.0
    waiting = [maker[value] for value in instruction.inputs if value in maker]
    while waiting:
        before = waiting.pop()
        if before.op not in CHEAP:
            last = max(last, position[before])
        elif before not in moved:
            moved[before] = None
            waiting += [maker[value] for value in before.inputs if value in maker]
    return list(moved), last


def substituted(
    instruction: Instruction, values: Mapping[Value, Value], outputs: Sequence[Value] | None = None
) -> Instruction:
    """Returns an instruction whose inputs are replaced by `values`."""
    if outputs is None and values.keys().isdisjoint(instruction.inputs):
        return instruction
    inputs = tuple(values.get(value, value) for value in instruction.inputs)
    return replace(instruction, inputs=inputs, outputs=tuple(outputs or instruction.outputs))


def are_alike(block: Block, other: Block) -> bool:
    """Whether two blocks have the same instructions, in the same order, on values of their own."""
    return _are_alike(block, other, {})


def _are_alike(block: Block, other: Block, known: dict[Value, Value]) -> bool:
    """Whether two blocks are alike if `known` says which value is which."""
    if len(block.instructions) != len(other.instructions):
        return False
    if not _have_like_types(block.inputs, other.inputs):
        return False
    known.update(zip(block.inputs, other.inputs, strict=True))
    for one, two in zip(block.instructions, other.instructions, strict=True):
        if one.op != two.op or not _read_alike(one.inputs, two.inputs, known):
            return False
        if not _have_like_types(one.outputs, two.outputs):
            return False
        if not _have_like_params(one.params, two.params, known):
            return False
        known.update(zip(one.outputs, two.outputs, strict=True))
    return _read_alike(block.outputs, other.outputs, known)


def _read_alike(
    values: Sequence[Value], others: Sequence[Value], known: Mapping[Value, Value]
) -> bool:
    return len(values) == len(others) and all(
        known.get(value) is other for value, other in zip(values, others, strict=True)
    )


def _have_like_types(values: Sequence[Value], others: Sequence[Value]) -> bool:
    return len(values) == len(others) and all(
        value.shape == other.shape and value.dtype == other.dtype and value.layout == other.layout
        for value, other in zip(values, others, strict=True)
    )


def _have_like_params(
    params: Mapping[str, Any], others: Mapping[str, Any], known: dict[Value, Value]
) -> bool:
    return params.keys() == others.keys() and all(
        param is others[name] or _is_like(param, others[name], known)
        for name, param in params.items()
    )


def _is_like(param: object, other: object, known: dict[Value, Value]) -> bool:
    if isinstance(param, Block):
        return isinstance(other, Block) and _are_alike(param, other, known)
    if isinstance(param, np.ndarray) and isinstance(other, np.ndarray):
        return param.dtype == other.dtype and param.tobytes() == other.tobytes()
    return exact_key(param) == exact_key(other)
