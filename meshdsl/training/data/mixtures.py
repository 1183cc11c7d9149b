"""Weighted mixtures: several sources, each of which gives its share of the examples.

Guarantees:
    Which source an example comes from is a function of its position alone; before any position,
    each of n sources has given its share to within n examples.
    Each source goes through epochs of its own: all of its examples once, before any comes twice.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from meshdsl.training.data.examples import Batch, Source


@dataclass(frozen=True, eq=False)
class Mixture:
    """Sources after one another, with the share of the examples that each is to give.

    Attributes:
        sources: their batches have the same entries.
        weights: relative to each other; they need not add up to one.

    Raises:
        ValueError: there are no sources, or not one positive weight for each.
    """

    sources: tuple[Source, ...]
    weights: tuple[Fraction, ...]

    def __post_init__(self) -> None:
        if not self.sources or len(self.sources) != len(self.weights) or min(self.weights) <= 0:
            weights = ", ".join(map(str, self.weights))
            raise ValueError(
                f"a mixture needs one weight above 0 for each of its sources; it has "
                f"{len(self.sources)} sources and the weights {weights or 'none'}"
            )

    @property
    def ends(self) -> NDArray[np.int64]:
        """The number after the last row of each source."""
        return np.cumsum([len(source) for source in self.sources])

    def __len__(self) -> int:
        return int(self.ends[-1])

    def __getitem__(self, rows: NDArray[np.int64]) -> Batch:
        ends = self.ends
        chosen = np.searchsorted(ends, rows, side="right")
        result: Batch = {}
        for number in np.unique(chosen) if len(rows) else [0]:  # a part may have no rows
            here = chosen == number
            start = ends[number] - len(self.sources[number])
            for name, array in self.sources[number][rows[here] - start].items():
                if name not in result:
                    result[name] = np.empty((len(rows), *array.shape[1:]), array.dtype)
                result[name][here] = array
        return result


class Shares:
    """Position -> (number of the source, position in that source), as grain selects data sets.

    The sources are separated one after another: of k examples, `k * rest // all` are not of the
    first source, and so on for the remaining sources.
    """

    def __init__(self, weights: Sequence[Fraction]) -> None:
        scale = math.lcm(*(weight.denominator for weight in weights))
        self._shares = [int(weight * scale) for weight in weights]

    def __len__(self) -> int:
        return sys.maxsize

    def __getitem__(self, position: int) -> tuple[int, int]:
        before, after, left = position, position + 1, sum(self._shares)
        for number, share in enumerate(self._shares):
            others = before * (left - share) // left
            others_after = after * (left - share) // left
            if others == others_after:
                return number, before - others
            before, after, left = others, others_after, left - share
        raise AssertionError("the last source takes what is left")
