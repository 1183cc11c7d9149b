"""Which rows of a batch a process reads: those that its devices hold.

Guarantees:
    What the devices get is what they would get of whole batches. Where the rows of a process are
    not known beforehand, as with dims that are padded, it reads whole batches.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from meshdsl.tensors.named_array import NamedArray


@dataclass(frozen=True)
class Rows:
    """A run of rows of a batch, and how its entries are stored: `Rows(0, 8, "batch", {...})`.

    Attributes:
        start, stop: the rows along `dim`.
        stored: the `Storage` of each entry, by name.
    """

    start: int
    stop: int
    dim: str
    stored: Mapping[str, Any]

    @property
    def read(self) -> slice:
        return slice(self.start, self.stop)

    def globally(self, batch: Mapping[str, NamedArray]) -> dict[str, NamedArray]:
        """Returns the batch of all processes, of which this one holds these rows.

        Raises:
            ValueError: an entry has another number of rows.
        """
        return {name: self._globally(name, array) for name, array in batch.items()}

    def _globally(self, name: str, array: NamedArray) -> NamedArray:
        stored = self.stored[name]
        place = array.dims.names.index(self.dim)
        if array.dims.sizes[place] != self.stop - self.start:
            raise ValueError(
                f"`{name}` of a batch has {array.dims.sizes[place]} rows, where this process "
                f"reads {self.stop - self.start}"
            )
        data = np.asarray(array)

        def part(index: Any) -> np.ndarray:
            first, last, _ = index[place].indices(stored.sizes[place])
            own = slice(first - self.start, last - self.start)
            return data[*index[:place], own, *index[place + 1 :]]

        found = jax.make_array_from_callback(stored.sizes, stored.sharding, part)
        return NamedArray(found, stored.dims)


def rows_read(stored: Mapping[str, Any], dim: str) -> Rows | None:
    """Returns the rows that the devices of this process hold of a batch; None: all of them.

    Args:
        stored: the `Storage` of each entry, by name.
        dim: whose rows these are.
    """
    first, last, size = [], [], 0
    for each in stored.values():
        if each.cuts or dim not in each.dims.names:
            return None
        place = each.dims.names.index(dim)
        size = each.sizes[place]
        for index in each.sharding.addressable_devices_indices_map(each.sizes).values():
            start, stop, _ = index[place].indices(size)
            first.append(start)
            last.append(stop)
    if not first or (min(first), max(last)) == (0, size):
        return None
    return Rows(min(first), max(last), dim, dict(stored))
