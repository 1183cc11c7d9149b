"""The sizes of an attention instruction on one device, and the blocks of its scores.

Up to `DIRECT` scores are computed at once. More scores are computed in blocks: of a part of the
batches and heads, of the rows (positions of queries), and of the columns (positions of the memory).
So the memory in use grows neither with the lengths nor with the batch, and products stay large.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from meshdsl.lowering.parameters import Attention, parameters_of
from meshdsl.tensors.dims import Dimension, Shape

if TYPE_CHECKING:
    from meshdsl.lowering.program import Instruction, Value

# The most scores that are computed at once, and the most scores of one block.
DIRECT = 2**23
BLOCK = 2**22
# The most and the fewest rows or columns of one block.
LONGEST, SHORTEST = 512, 64
SCORES = np.dtype("float32")  # the dtype of scores
_PADS = 0.1  # the most pads of blocks of a power of two, as a share of the size
_MULTIPLE = 8  # of which rows and columns of other blocks are
_NEAR = 4  # how many times as large as a part of batches and heads the room for it may be


@dataclass(frozen=True)
class AttentionSizes:
    """The dims of one device's scores: for each position of `lead`, a matrix of rows x columns.

    Attributes:
        lead: the dims of the queries other than their length; dims shared with the keys come first.
        rows: the length of the queries; a dim of size 1 if they have none.
        columns: the memory: the positions of keys and values.
        features: the dim contracted between queries and keys.
        values: the dims of the value features.
        shared: how many dims of `lead`, from the first on, keys and values have too: a block may
            have a part of these.
        chosen: the rows and columns of one block, if they are given. It has all of `lead` then,
            unless `chosen_lead` is given too.
        chosen_lead: the part of `lead` in one block, if that is given.
    """

    lead: Shape
    rows: Dimension
    columns: Dimension
    features: Dimension
    values: Shape
    shared: int = 0
    chosen: tuple[int, int] | None = None
    chosen_lead: Shape | None = None

    @staticmethod
    def of(instruction: Instruction) -> AttentionSizes:
        q, k, v = (value.local for value in instruction.inputs[:3])
        params = parameters_of(instruction, Attention)
        queries = q.without([params["features"]])
        lead = queries.without([params["length"]])
        of_keys = [dim for dim in lead if dim in k]
        of_both = list(itertools.takewhile(lambda dim: dim in v, of_keys))
        return AttentionSizes(
            Shape([*of_keys, *lead.without([dim.name for dim in of_keys])]),
            queries.find(params["length"]) or Dimension("rows_", 1),
            k.get(params["memory"]),
            q.get(params["features"]),
            v.without([params["memory"], *queries.names]),
            len(of_both),
            params.get("blocks"),
        )

    @property
    def scores(self) -> int:
        """The number of scores."""
        return self.lead.volume * self.rows.size * self.columns.size

    @property
    def blocks(self) -> tuple[int, int]:
        """The rows and columns of one block; all of them if there are few scores."""
        return self.chosen or self.blocks_of(self.lead_block.volume)

    def blocks_of(self, lead: int) -> tuple[int, int]:
        """Returns the rows and columns of blocks with so many batches and heads."""
        if self.scores <= DIRECT:
            return self.rows.size, self.columns.size
        columns = _fit(self.columns.size, BLOCK // (lead * min(self.rows.size, SHORTEST)))
        return _fit(self.rows.size, BLOCK // (lead * columns)), columns

    @property
    def lead_block(self) -> Shape:
        """The part of `lead` in one block: as much as leaves room for the longest blocks."""
        if self.chosen_lead is not None:
            return self.chosen_lead
        if self.chosen is not None or self.scores <= DIRECT:
            return self.lead
        sizes = list(self.lead.sizes)
        longest = _fit(self.rows.size, LONGEST) * _fit(self.columns.size, LONGEST)
        for number in reversed(range(self.shared)):
            after = math.prod(sizes[number + 1 :])
            sizes[number] = _part(sizes[number], BLOCK // (longest * after))
        return Shape(map(Dimension, self.lead.names, sizes))

    @property
    def divided(self) -> int | None:
        """The first dim of `lead` of which a block has a part; None: a block has all of `lead`."""
        pairs = zip(self.lead, self.lead_block, strict=True)
        return next((number for number, (dim, part) in enumerate(pairs) if dim != part), None)

    def part(self, number: int) -> AttentionSizes:
        """Returns the sizes of a block's part of a dim of `lead`, with the same blocks."""
        lead, block = list(self.lead), self.lead_block
        lead[number] = block[number]
        return replace(self, lead=Shape(lead), chosen=self.blocks, chosen_lead=block)

    @property
    def full(self) -> Shape:
        """The dims of the scores."""
        return Shape([*self.lead, self.rows, self.columns])

    @property
    def at_once(self) -> bool:
        """Whether all scores are one block."""
        return self.blocks == (self.rows.size, self.columns.size) and self.divided is None

    @property
    def block(self) -> Shape:
        """The dims of one block of scores."""
        names = self.rows.name, self.columns.name
        return Shape([*self.lead_block, *map(Dimension, names, self.blocks)])

    def flops(self, products_of_features: int, products_of_values: int) -> int:
        """Returns the flops of some products of scores with features, and with value features."""
        features = (
            products_of_features * self.features.size + products_of_values * self.values.volume
        )
        return 2 * self.scores * features


def scored_before(instructions: Iterable[Instruction]) -> dict[Instruction, Instruction]:
    """Returns, for gradients of attention, the attention before that computes the same scores."""
    first: dict[tuple[Value, ...], Instruction] = {}
    found: dict[Instruction, Instruction] = {}
    for instruction in instructions:
        if instruction.op == "attention":
            first[instruction.inputs] = instruction
        elif instruction.op == "attention_gradient":
            same = first.get(instruction.inputs[:-3])
            if same is not None:
                found[instruction] = same
    return found


def _fit(size: int, budget: int) -> int:
    """Returns the rows or columns of a block: at most `size`, `LONGEST`, and near a budget.

    It is a power of two, of at least `SHORTEST`. Where such blocks have many pads, they share the
    size evenly: of 577 rows, two blocks have 296.
    """
    most = max(SHORTEST, min(LONGEST, budget))
    if size <= most:
        return size
    power = 2 ** (most.bit_length() - 1)
    if -size % power <= _PADS * size:
        return power
    even = -(-size // -(-size // most))
    return min(most, -(-even // _MULTIPLE) * _MULTIPLE)


def _part(size: int, most: int) -> int:
    """Returns the largest divisor of a size that is at most `most`.

    Sizes without a divisor near it, such as large primes, stay whole: loops over parts that are
    much smaller would take longer.
    """
    part = max((d for d in range(1, min(size, most) + 1) if size % d == 0), default=1)
    return part if _NEAR * part > most else size
