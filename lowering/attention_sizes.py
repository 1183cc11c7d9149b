"""The sizes of one attention instruction on a device, and the blocks its scores are computed in.

Scores that fit `DIRECT` are computed all at once. Others are computed in blocks of rows (positions
of queries) and columns (positions of the memory), so that what is held at a time does not grow with
the lengths.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from meshdsl.lowering.parameters import Attention, parameters_of
from meshdsl.tensors.dims import Dimension, Shape

if TYPE_CHECKING:
    from meshdsl.lowering.program import Instruction

# Numbers of one matrix of scores that is computed at once, and of one block of a larger one.
DIRECT = 2**23
BLOCK = 2**22
LONGEST, SHORTEST = 512, 64
SCORES = np.dtype("float32")


@dataclass(frozen=True)
class AttentionSizes:
    """What one device attends: `lead` matrices of rows x columns scores.

    Attributes:
        lead: the dims of the queries other than their length: those shared with the keys first.
        rows: the length of the queries; of size 1 where they have none of their own.
        columns: the memory.
        features: contracted between queries and keys.
        values: the value features.
        chosen: the rows and columns of one block, where something else decides on them.
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
        """Rows and columns of one block; all of them, where the scores are few."""
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
        """Returns the flops of products of scores with features, and with value features."""
        wide = products_of_features * self.features.size + products_of_values * self.values.volume
        return 2 * self.scores * wide


def _fit(size: int, budget: int) -> int:
    """Returns a power of two near the budget, or the size if that is less."""
    power = 2 ** (max(budget, 1).bit_length() - 1)
    return min(size, max(SHORTEST, min(LONGEST, power)))
