"""Keeping: weights that both passes gather are gathered once, if there is memory for them.

A weight that is stored split is gathered for the forward pass, freed, and gathered again for the
backward pass. Outside of loops the time between may be short: the logits read a table of tokens
last, and their gradient reads it again. This pass keeps such a weight in between, unless a device
would exceed its memory at some instruction there. Weights that are kept for the shortest time come
first. Loops over layers gather their slices again; `--weights=keep` keeps those.
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
        path: the parameter's.
        bytes: the memory on a device that it takes in between.
        wire_bytes: the bytes that a device saves on the wire, per gather that is left out.
    """

    path: str
    bytes: int
    wire_bytes: float


def allowance(program: SpmdProgram, limit: int | None) -> int:
    """Returns the bytes that a device may use: the limit, or a little more than the peak."""
    return int(program.peak_bytes * (1 + SHARE)) if limit is None else limit


def keep_gathered(program: SpmdProgram, limit: int | None = None) -> SpmdProgram:
    """Returns a program that keeps weights as far as memory goes, or the program itself.

        keep_gathered(program, program.peak_bytes)

    `program.kept` lists the weights that it keeps. It must run before passes that join collectives.

    Args:
        limit: the bytes that a device has; None allows `SHARE` more than the program's peak.
    """
    if not any(_frees(one) for one, _ in program.block.walk()):
        return program
    allowed, curve = allowance(program, limit), program.memory.curve
    inputs = zip(program.block.inputs, program.input_paths, strict=True)
    paths = dict(_paths(program.block, dict(inputs)))
    kept: list[Kept] = []

    def change(block: Block) -> Block:
        again = list(_regathered(block))
        if not again:
            return block
        levels = np.array([curve.get(one, 0) for one in block.instructions])
        instead: dict[Value, Value] = {}
        for one in sorted(again, key=lambda one: one.length):
            spans = [(slice(start + 1, end), size) for start, end, size in one.spans]
            if any(levels[span].max(initial=0) + size > allowed for span, size in spans):
                continue
            for span, size in spans:
                levels[span] += size
            instead.update(one.values)
            sent = sum(wire_of(move, program.mesh) for move in one.moves)
            kept.append(Kept(paths.get(one.home, ""), sum(size for _, size in spans), sent))
        if not instead:
            return block
        instructions = tuple(substituted(one, instead) for one in block.instructions)
        outputs = tuple(instead.get(value, value) for value in block.outputs)
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
        values: the values that are moved again, and the earlier values equal to them.
        moves: the instructions that move it again.
        spans: per earlier value, the position of its last reader, the position at which it is moved
            again, and its bytes.
    """

    home: Value
    values: dict[Value, Value] = field(default_factory=dict)
    moves: list[Instruction] = field(default_factory=list)
    spans: list[tuple[int, int, int]] = field(default_factory=list)

    @property
    def length(self) -> int:
        return sum(end - start for start, end, _ in self.spans)


def _frees(one: Instruction) -> bool:
    """Whether an instruction is the barrier after which a weight is gathered again."""
    return one.op == "barrier" and parameters_of(one, Barrier).get("stored", False)


def _regathered(block: Block) -> Iterator[_Regathered]:
    """Yields the weights of a block that are moved again in the same way."""
    homes = {one.inputs[0] for one in block.instructions if _frees(one)}
    if not homes:
        return
    moving = [_moves(one) for one in block.instructions]
    last = {v: n for n, one in enumerate(block.instructions) for v in one.inputs}
    last |= dict.fromkeys(block.outputs, len(block.instructions))
    known: dict[Hashable, Value] = {}
    weights: dict[Value, _Regathered] = {}
    pairs = zip(block.instructions, moving, strict=True)
    further = {v for one, moves in pairs if not moves for v in one.inputs}.union(
        block.outputs
    )  # values that are read, not only moved on
    for place, one in enumerate(block.instructions):
        if _frees(one):
            weights[one.outputs[0]] = _Regathered(one.inputs[0], {one.outputs[0]: one.inputs[0]})
        if not moving[place]:
            continue
        (value,), (result,) = one.inputs, one.outputs
        weight = weights.get(value)
        if weight is None:
            if value in homes:
                known[_key(one, value)] = result
                homes.add(result)
            continue
        before = known.get(_key(one, weight.values[value]))
        if before is None:  # moved in another way than before
            continue
        weights[result] = weight
        weight.values[result] = before
        weight.moves.append(one)
        if result in further:
            weight.spans.append((last.get(before, place), place, before.bytes))
    for weight in dict.fromkeys(weights.values()):
        if any(one.is_collective for one in weight.moves):
            yield weight


def _moves(one: Instruction) -> bool:
    alone = len(one.inputs) == len(one.outputs) == 1
    return alone and (one.is_collective or (one.op in CHEAP and one.op != "barrier"))


def _key(one: Instruction, value: Value) -> Hashable:
    (result,) = one.outputs
    return one.op, value, result.shape, result.dtype, result.layout, exact_key(one.params)


def _paths(block: Block, paths_of_inputs: Mapping[Value, str]) -> Iterator[tuple[Value, str]]:
    """Yields parameters, and values moved or cast from them, with their paths; in bodies too."""
    paths = dict(paths_of_inputs)
    for one in block.instructions:
        if one.op in CHEAP:
            pairs = zip(one.inputs, one.outputs, strict=False)
            paths.update((out, paths[value]) for value, out in pairs if value in paths)
        for body in one.bodies:
            inputs = one.inputs[len(one.inputs) - len(body.inputs) :]
            inner = zip(body.inputs, inputs, strict=False)
            yield from _paths(body, {i: paths[o] for i, o in inner if o in paths})
    yield from paths.items()
