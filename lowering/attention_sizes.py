"""The sizes of an attention instruction on one device, and the blocks of its scores.

Up to `DIRECT` scores are computed at once. More scores are computed in blocks of rows (positions of
queries) and columns (positions of the memory), so that the memory in use does not grow with the
lengths.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
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


@dataclass(frozen=True)
class AttentionSizes:
    """The dims of one device's scores: for each position of `lead`, a matrix of rows x columns.

    Attributes:
        lead: the dims of the queries other than their length; dims shared with the keys come first.
        rows: the length of the queries; a dim of size 1 if they have none.
        columns: the memory: the positions of keys and values.
        features: the dim contracted between queries and keys.
        values: the dims of the value features.
        chosen: the rows and columns of one block, if the instruction gives them.
    """

    lead: Shape
    rows: Dimension
    columns: Dimension
    features: Dimension
    values: Shape
    chosen: tuple[int, int] | None = None

    @staticmethod
    def of(instruction: Instruction) -> AttentionSizes:
        q, k, v = (value.local for value in instruction.inputs[:3])
        params = parameters_of(instruction, Attention)
        queries = q.without([params["features"]])
        lead = queries.without([params["length"]])
        shared = [dim for dim in lead if dim in k]
        return AttentionSizes(
            Shape([*shared, *lead.without([dim.name for dim in shared])]),
            queries.find(params["length"]) or Dimension("rows_", 1),
            k.get(params["memory"]),
            q.get(params["features"]),
            v.without([params["memory"], *queries.names]),
            params.get("blocks"),
        )

    @property
    def scores(self) -> int:
        """The number of scores."""
        return self.lead.volume * self.rows.size * self.columns.size

    @property
    def blocks(self) -> tuple[int, int]:
        """The rows and columns of one block; all of them if there are few scores."""
        if self.chosen is not None:
            return self.chosen
        if self.scores <= DIRECT:
            return self.rows.size, self.columns.size
        columns = _fit(self.columns.size, BLOCK // (self.lead.volume * SHORTEST))
        rows = _fit(self.rows.size, BLOCK // (self.lead.volume * columns))
        return rows, columns

    @property
    def full(self) -> Shape:
        """The dims of the scores."""
        return Shape([*self.lead, self.rows, self.columns])

    @property
    def at_once(self) -> bool:
        """Whether all scores are one block."""
        return self.blocks == (self.rows.size, self.columns.size)

    @property
    def block(self) -> Shape:
        """The dims of one block of scores."""
        names = self.rows.name, self.columns.name
        return Shape([*self.lead, *map(Dimension, names, self.blocks)])

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
    """Returns a power of two near the budget, between `SHORTEST` and `LONGEST`; at most `size`."""
    power = 2 ** (max(budget, 1).bit_length() - 1)
    return min(size, max(SHORTEST, min(LONGEST, power)))
