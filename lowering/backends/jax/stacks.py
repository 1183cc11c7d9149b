"""Stacks that a loop writes to where they are.

A layer of a model that decodes overwrites a few positions of its cache. A loop whose results are
stacked would copy the whole cache of the layer from one stack to another for that. Here the stack
is carried through the loop, and only the positions are written to it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from meshdsl.lowering.backends.common.exchange import aligned_piece, permuted_piece
from meshdsl.lowering.backends.jax.machine import Arrays, Emitter, Machine
from meshdsl.lowering.backends.jax.namespace import inside_or_past
from meshdsl.lowering.parameters import Scan, parameters_of
from meshdsl.lowering.program import Block, Instruction, Value


@dataclass(frozen=True)
class WrittenStack:
    """A stack of results that is one of operands with a part of each slice overwritten.

    Attributes:
        operand: its number among the stacks of operands.
        result: its number among the stacks of results.
        update: the instruction of the body that overwrites the part.
    """

    operand: int
    result: int
    update: Instruction


def written_stacks(instruction: Instruction) -> list[WrittenStack]:
    """Returns the stacks that a loop may write to where they are."""
    params = parameters_of(instruction, Scan)
    body, carries = params["body"], params["carries"]
    first = params["consts"] + carries
    read_ahead = params.get("ahead", ())
    operands = {
        value: number
        for number, value in enumerate(body.inputs[first:])
        if number not in read_ahead
    }
    results = body.outputs[carries:]
    uses, updates = _uses(body), {each.outputs[0]: each for each in body.instructions}
    stacks = []
    for number, value in enumerate(results):
        update = updates.get(value)
        if update is None or update.op != "update" or results.count(value) > 1:
            continue
        slice_ = update.inputs[0]
        if slice_ in operands and uses[slice_] == 1 and slice_.local.names == value.local.names:
            stacks.append(WrittenStack(operands[slice_], number, update))
    return stacks


def _uses(block: Block) -> Counter[Value]:
    """Returns how often each value of a block is read, or is a result."""
    uses = Counter(block.outputs)
    for instruction in block.instructions:
        uses.update(instruction.inputs)
    return uses


@dataclass
class Stacks:
    """The stacks that an iteration of a loop writes to, while it is emitted.

    Attributes:
        outside: emits updates of other arrays.
        position: of the iteration's slices.
        arrays: by the instruction that writes to them; their slices are at the front.
    """

    outside: Emitter
    position: Any = None
    arrays: dict[Instruction, jax.Array] = field(default_factory=dict)

    def begin(self, position: Any, written: Sequence[WrittenStack], arrays: Arrays) -> None:
        """Takes the stacks before an iteration."""
        self.position = position
        self.arrays = {one.update: array for one, array in zip(written, arrays, strict=True)}

    def slice(self, update: Instruction) -> jax.Array:
        """Returns the slice of the iteration."""
        return lax.dynamic_index_in_dim(self.arrays[update], self.position, keepdims=False)

    def update(self, machine: Machine, instruction: Instruction, inputs: Arrays) -> Any:
        """Emits an update: of a slice of a stack, or of any other array."""
        if instruction not in self.arrays:
            return self.outside(machine, instruction, inputs)
        stack, (_, piece, start) = self.arrays[instruction], inputs
        if start.ndim:
            piece, at = permuted_piece(machine.xp, instruction, piece)
            places = inside_or_past(start, stack.shape[1 + at])
            index = (self.position, *[slice(None)] * at, places)
            if at:  # indices that a slice parts put their dim first
                piece = jnp.moveaxis(piece, at, 0)
            self.arrays[instruction] = stack.at[index].set(piece, mode="drop", unique_indices=True)
            return self.slice(instruction)
        piece, first, at = aligned_piece(machine.xp, instruction, piece, start)
        corner = [jnp.int32(0)] * stack.ndim
        corner[0], corner[1 + at] = self.position, jnp.asarray(first, jnp.int32)
        before = lax.dynamic_slice(stack, corner, (1, *piece.shape))
        # A piece that would exceed the dim changes nothing, as without a stack.
        piece = jnp.where(start == first, piece[None], before)
        self.arrays[instruction] = lax.dynamic_update_slice(stack, piece, corner)
        return self.slice(instruction)
