"""The rows of a batch that a process reads: those of its devices.

Guarantees:
    The devices get the same values as from full batches. If the rows of a process are not known
    beforehand, as with padded dims, it reads full batches.
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
    """Consecutive rows of a batch, and how entries are stored: `Rows(0, 8, "batch", {...})`.

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
        """Returns the batch of all processes, of which this one has read these rows.

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

        data_of_all = jax.make_array_from_callback(stored.sizes, stored.sharding, part)
        return NamedArray(data_of_all, stored.dims)


def rows_read(stored: Mapping[str, Any], dim: str) -> Rows | None:
    """Returns the rows of a batch on the devices of this process; None: all of them.

    Args:
        stored: the `Storage` of each entry, by name.
        dim: the dim of the rows.
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
