"""Bit operations on whole numbers; of bools they are the logical ones."""

from __future__ import annotations

from meshdsl.ops.elementwise.broadcasting import binary, unary
from meshdsl.tracing.graph import Work

__all__ = [
    "bit_and",
    "bit_not",
    "bit_or",
    "bit_xor",
    "population_count",
    "shift_left",
    "shift_right",
]

bit_not = unary(
    "bit_not", None, "ib", "Returns x with every bit flipped.", work=Work.STEP, symbol="~"
)
population_count = unary("population_count", None, "i", "Counts the bits set.", work=Work.STEP)
bit_and = binary("bit_and", [None, None], "ib", "Returns the bits set in x and y.", symbol="&")
bit_or = binary("bit_or", [None, None], "ib", "Returns the bits set in x or y.", symbol="|")
bit_xor = binary("bit_xor", [None, None], "ib", "Returns the bits that differ.", symbol="^")
shift_left = binary(
    "shift_left",
    [None, None],
    "i",
    "Returns x with its bits moved up by y places, 0 where y is as many as x has, or negative.",
    symbol="<<",
)
shift_right = binary(
    "shift_right",
    [None, None],
    "i",
    "Returns x with its bits moved down by y places; a signed number keeps its sign.",
    symbol=">>",
)
