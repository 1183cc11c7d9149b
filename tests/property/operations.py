"""What a random program may do next: one function per kind of operation, and the choice of one.

A function that finds no operands for its kind does nothing, and another is chosen.
"""

from __future__ import annotations

import numpy as np

from tests.property import basics, flow, movement, numbers, order, sliding
from tests.property.author import Author

_FAMILIES = (basics, movement, order, sliding, numbers, flow)
_KINDS = {kind: weight for family in _FAMILIES for kind, weight in family.OPERATIONS.items()}
# They need numbers of more digits, or of a larger range, than half precision has.
_WIDE = frozenset([numbers.complex_numbers, numbers.linalg, numbers.waves, order.extreme_products])
_CHANCES = np.array(list(_KINDS.values())) / sum(_KINDS.values())


def step(author: Author) -> None:
    """Draws one operation that applies."""
    kinds = list(_KINDS)
    while True:
        kind = kinds[author.rng.choice(len(kinds), p=_CHANCES)]
        if kind in _WIDE and author.dtype != np.float64:
            continue
        before = author.count
        kind(author)
        if author.count > before:
            return
