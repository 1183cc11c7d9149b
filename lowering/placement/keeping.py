"""Keeping: weights that both passes gather are gathered once, if there is memory for them.

A weight that is stored split is gathered for the forward pass, freed, and gathered again for the
backward pass. Outside of loops the time between may be short: the logits read a table of tokens
last, and their gradient reads it again. This pass keeps such a weight in between, unless a device
would exceed its memory at some instruction there. Weights that are kept for the shortest time are
tried first. Loops over layers gather their slices again; `--weights=keep` keeps those.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from meshdsl.lowering.parameters import Barrier, parameters_of
from meshdsl.lowering.passes.blocks import CHEAP, each_block, substituted
from meshdsl.lowering.passes.tidy import needed
from meshdsl.lowering.program import Block, Instruction, SpmdProgram, Value, exact_key, wire_of

# Without a limit on memory, keeping weights may raise the peak by this share of it.
SHARE = 1 / 32


@dataclass(frozen=True)
class Kept:
    """A weight that is gathered once for both passes.

    Attributes:
        path: the path of the parameter.
        bytes: the memory that it needs on a device in between.
        wire_bytes: the bytes that a device need not send, since the second gather is left out.
    """

    path: str
    bytes: int
    wire_bytes: float


def allowance(program: SpmdProgram, limit: int | None) -> int:
    """Returns the bytes that a device may use: the limit, or a little more than the peak."""
    return int(program.peak_bytes * (1 + SHARE)) if limit is None else limit


def keep_gathered(program: SpmdProgram, limit: int | None = None) -> SpmdProgram:
    """Returns a program that keeps as many weights as fit into memory, or the program itself.

        keep_gathered(program, program.peak_bytes)

    `program.kept` lists the weights that it keeps. It must run before passes that join collectives.

    Args:
        limit: the bytes that a device has; None allows `SHARE` more than the program's peak.
    """
    if not any(_frees(instruction) for instruction, _ in program.block.walk()):
        return program
    allowed, curve = allowance(program, limit), program.memory.curve
    inputs = zip(program.block.inputs, program.input_paths, strict=True)
    paths = dict(_paths(program.block, dict(inputs)))
    kept: list[Kept] = []

    def change(block: Block) -> Block:
        regathered = list(_regathered(block))
        if not regathered:
            return block
        levels = np.array([curve.get(instruction, 0) for instruction in block.instructions])
        replacements: dict[Value, Value] = {}
        for weight in sorted(regathered, key=lambda weight: weight.length):
            # In between, so without the last reader and without the second gather.
            spans = [(slice(start + 1, end), size) for start, end, size in weight.spans]
            if any(levels[span].max(initial=0) + size > allowed for span, size in spans):
                continue
            for span, size in spans:
                levels[span] += size
            replacements.update(weight.values)
            sent = sum(wire_of(move, program.mesh) for move in weight.moves)
            kept.append(Kept(paths.get(weight.home, ""), sum(size for _, size in spans), sent))
        if not replacements:
            return block
        instructions = tuple(
            substituted(instruction, replacements) for instruction in block.instructions
        )
        outputs = tuple(replacements.get(value, value) for value in block.outputs)
        return needed(replace(block, instructions=instructions, outputs=outputs))

    changed = each_block(program, change)
    if changed is program:
        return program
    return replace(changed, kept=tuple(kept))


@dataclass(eq=False)
class _Regathered:
    """A stored weight that is moved again after the barrier that frees it.

    Attributes:
        home: the stored weight.
        values: for the result of the barrier, and each value that is moved again from it, the equal
            value from before the barrier.
        moves: the instructions that move it again.
        spans: for each value that was moved before, the position of its last reader, the position
            at which it is moved again, and its bytes.
    """

    home: Value
    values: dict[Value, Value] = field(default_factory=dict)
    moves: list[Instruction] = field(default_factory=list)
    spans: list[tuple[int, int, int]] = field(default_factory=list)

    @property
    def length(self) -> int:
        return sum(end - start for start, end, _ in self.spans)


def _frees(instruction: Instruction) -> bool:
    """Whether an instruction is the barrier after which a weight is gathered again."""
    return instruction.op == "barrier" and parameters_of(instruction, Barrier).get("stored", False)


def _regathered(block: Block) -> Iterator[_Regathered]:
    """Yields the weights of a block that are moved again in the same way."""
    stored = {instruction.inputs[0] for instruction in block.instructions if _frees(instruction)}
    if not stored:
        return
    are_moves = [_moves(instruction) for instruction in block.instructions]
    last_reads = {
        v: n for n, instruction in enumerate(block.instructions) for v in instruction.inputs
    }
    last_reads |= dict.fromkeys(block.outputs, len(block.instructions))
    moved_before: dict[Hashable, Value] = {}
    weights: dict[Value, _Regathered] = {}
    pairs = zip(block.instructions, are_moves, strict=True)
    # Values that are read by other instructions than moves.
    computed_with = {v for instruction, moves in pairs if not moves for v in instruction.inputs}
    computed_with.update(block.outputs)
    for position, instruction in enumerate(block.instructions):
        if _frees(instruction):
            weights[instruction.outputs[0]] = _Regathered(
                instruction.inputs[0], {instruction.outputs[0]: instruction.inputs[0]}
            )
        if not are_moves[position]:
            continue
        (value,), (result,) = instruction.inputs, instruction.outputs
        weight = weights.get(value)
        if weight is None:
            if value in stored:
                moved_before[_key(instruction, value)] = result
                stored.add(result)
            continue
        before = moved_before.get(_key(instruction, weight.values[value]))
        if before is None:  # it was not moved in this way before
            continue
        weights[result] = weight
        weight.values[result] = before
        weight.moves.append(instruction)
        if result in computed_with:
            weight.spans.append((last_reads.get(before, position), position, before.bytes))
    for weight in dict.fromkeys(weights.values()):
        if any(move.is_collective for move in weight.moves):
            yield weight


def _moves(instruction: Instruction) -> bool:
    single = len(instruction.inputs) == len(instruction.outputs) == 1
    return single and (
        instruction.is_collective or (instruction.op in CHEAP and instruction.op != "barrier")
    )


def _key(instruction: Instruction, value: Value) -> Hashable:
    (result,) = instruction.outputs
    return (
        instruction.op,
        value,
        result.shape,
        result.dtype,
        result.layout,
        exact_key(instruction.params),
    )


def _paths(block: Block, paths_of_inputs: Mapping[Value, str]) -> Iterator[tuple[Value, str]]:
    """Yields parameters, and values moved or cast from them, with their paths; in bodies too."""
    paths = dict(paths_of_inputs)
    for instruction in block.instructions:
        if instruction.op in CHEAP:
            pairs = zip(instruction.inputs, instruction.outputs, strict=False)
            paths.update((out, paths[value]) for value, out in pairs if value in paths)
        for body in instruction.bodies:
            inputs = instruction.inputs[len(instruction.inputs) - len(body.inputs) :]
            inner = zip(body.inputs, inputs, strict=False)
            yield from _paths(body, {i: paths[o] for i, o in inner if o in paths})
    yield from paths.items()
