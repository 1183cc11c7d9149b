"""Keeping: weights that both passes gather are gathered once, where the memory is there anyway.

A weight that is stored split is gathered for the forward pass, freed, and gathered again for the
backward pass. Outside of loops that can be little apart: a table of tokens is last read for the
logits, and read again for their gradient. Here such a weight is kept in between, if at none of the
instructions there a device would then hold more than it may. Those that are kept for the shortest
time come first. Loops over layers gather their slices again: keeping those is for `--weights=keep`.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from meshdsl.lowering.parameters import Barrier, parameters_of
from meshdsl.lowering.passes.blocks import CHEAP, each_block, substituted
from meshdsl.lowering.passes.tidy import needed
from meshdsl.lowering.program import Block, Instruction, SpmdProgram, Value, exact, wire_of

# Without a limit on memory, keeping weights may raise the peak by this share of it.
SHARE = 1 / 32


@dataclass(frozen=True)
class Kept:
    """A weight that is gathered once for both passes.

    Attributes:
        path: the parameter's.
        bytes: what a device holds of it in between.
        wire_bytes: what a device sends less, each time that it would be gathered again.
    """

    path: str
    bytes: int
    wire_bytes: float


def allowance(program: SpmdProgram, limit: int | None) -> int:
    """Returns the bytes that a device may hold: the limit, or a little more than it holds."""
    return int(program.peak_bytes * (1 + SHARE)) if limit is None else limit


def keep_gathered(program: SpmdProgram, limit: int | None = None) -> SpmdProgram:
    """Returns a program that keeps weights as far as memory goes, or the program itself.

        keep_gathered(program, program.peak_bytes)

    What it keeps is in `program.kept`. To be used before passes: collectives are not joined yet.

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
            spans = [(slice(start + 1, end), held) for start, end, held in one.spans]
            if any(levels[span].max(initial=0) + held > allowed for span, held in spans):
                continue
            for span, held in spans:
                levels[span] += held
            instead.update(one.values)
            sent = sum(wire_of(move, program.mesh) for move in one.moves)
            kept.append(Kept(paths.get(one.home, ""), sum(held for _, held in spans), sent))
        if not instead:
            return block
        instructions = tuple(substituted(one, instead) for one in block.instructions)
        outputs = tuple(instead.get(value, value) for value in block.outputs)
        return needed(replace(block, instructions=instructions, outputs=outputs))

    found = each_block(program, change)
    if found is program:
        return program
    return replace(found, kept=tuple(kept))


@dataclass(eq=False)
class _Regathered:
    """A stored weight that is moved again behind the barrier that frees it.

    Attributes:
        home: the weight where it is stored.
        values: what has been moved again, and what that was before.
        moves: the instructions that move it again.
        spans: where what was moved before is read last, where it is moved again, and its bytes.
    """

    home: Value
    values: dict[Value, Value] = field(default_factory=dict)
    moves: list[Instruction] = field(default_factory=list)
    spans: list[tuple[int, int, int]] = field(default_factory=list)

    @property
    def length(self) -> int:
        return sum(end - start for start, end, _ in self.spans)


def _frees(one: Instruction) -> bool:
    """Whether an instruction is the barrier behind which a weight is gathered again."""
    return one.op == "barrier" and parameters_of(one, Barrier).get("stored", False)


def _regathered(block: Block) -> Iterator[_Regathered]:
    """Yields the weights of a block that are moved again just as before."""
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
    )  # what is read, rather than moved on
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
    return one.op, value, result.shape, result.dtype, result.layout, exact(one.params)


def _paths(block: Block, given: Mapping[Value, str]) -> Iterator[tuple[Value, str]]:
    """Yields what is a parameter, or moved or cast of one, with its path; bodies' as well."""
    found = dict(given)
    for one in block.instructions:
        if one.op in CHEAP:
            pairs = zip(one.inputs, one.outputs, strict=False)
            found.update((out, found[value]) for value, out in pairs if value in found)
        for body in one.bodies:
            inputs = one.inputs[len(one.inputs) - len(body.inputs) :]
            inner = zip(body.inputs, inputs, strict=False)
            yield from _paths(body, {i: found[o] for i, o in inner if o in found})
    yield from found.items()
