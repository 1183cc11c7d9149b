"""Examples that can be picked by number, given as arrays."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

Batch: TypeAlias = dict[str, np.ndarray]


class Source(Protocol):
    """Examples that can be picked by number."""

    def __len__(self) -> int: ...

    def __getitem__(self, rows: NDArray[np.int64], /) -> Batch:
        """Returns the chosen examples, stacked along a leading batch dim."""


@dataclass(frozen=True, eq=False)
class Arrays:
    """Examples given as whole arrays, one row each: `Arrays({"image": images, "label": labels})`.

    Raises:
        ValueError: the arrays differ in their number of rows.
    """

    arrays: Mapping[str, np.ndarray]

    def __post_init__(self) -> None:
        if len({len(array) for array in self.arrays.values()}) != 1:
            rows = ", ".join(f"{name} {len(array):,}" for name, array in self.arrays.items())
            raise ValueError(f"every array needs one row for each example, got {rows or 'none'}")

    def __len__(self) -> int:
        return len(next(iter(self.arrays.values())))

    def __getitem__(self, rows: NDArray[np.int64]) -> Batch:
        return {name: array[rows] for name, array in self.arrays.items()}
