"""Packed documents: several documents side by side in a row, none of which sees another.

Guarantees:
    Every token but the first of a document is a target exactly once, and the token before it in the
    same document is its input.
    A document of more than `length` inputs is cut into pieces of `length`, the last one shorter;
    pieces are segments like documents.
    Rows are a function of the documents and the length. The full pieces come first. Then the others
    follow greedily: each goes to the current row or, if it does not fit there, to a new one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from meshdsl.training.data.documents import Documents, unmarked
from meshdsl.training.data.examples import Batch


@dataclass(frozen=True, eq=False)
class PackedRows:
    """Rows of pieces, as `tokens`, `targets`, `segments` and `positions`: int32 [batch, length].

    With marked documents there is `learned` too: 1 where a target is learned, else 0. Segments
    count from 1 in each row; in the unused rest of a row, segments, tokens and targets are
    0. Positions count from 0 in each segment.

    Attributes:
        starts, sizes: where the inputs of each piece are, as `Documents.read` counts.
        bounds: the first piece of each row, and the end.
        chosen: the rows that belong to this split.
    """

    documents: Documents
    length: int
    starts: NDArray[np.int64]
    sizes: NDArray[np.int64]
    bounds: NDArray[np.int64]
    chosen: NDArray[np.int64]

    @staticmethod
    def of(documents: Documents, length: int) -> PackedRows:
        """Packs documents; those of one token, which have no target, are left out."""
        inputs = documents.sizes - 1
        full, rest = inputs // length, inputs % length
        owners = np.repeat(np.arange(len(documents)), full)
        turn = np.arange(len(owners)) - np.repeat(np.cumsum(full) - full, full)
        short = rest > 0
        starts = documents.starts[owners] + turn * length
        rest_starts = (documents.starts + full * length)[short]
        bounds = np.concatenate(
            [np.arange(len(owners)), len(owners) + _greedy(rest[short], length)]
        )
        return PackedRows(
            documents=documents,
            length=length,
            starts=np.concatenate([starts, rest_starts]),
            sizes=np.concatenate([np.full(len(owners), length), rest[short]]),
            bounds=bounds,
            chosen=np.arange(len(bounds) - 1),
        )

    def __len__(self) -> int:
        return len(self.chosen)

    def __getitem__(self, rows: NDArray[np.int64]) -> Batch:
        names = ["tokens", "targets", "segments", "positions"]
        names += ["learned"] if self.documents.marked else []
        batch = {name: np.zeros((len(rows), self.length), np.int32) for name in names}
        for number, row in enumerate(self.chosen[rows]):
            at = 0
            pieces = range(self.bounds[row], self.bounds[row + 1])
            for segment, piece in enumerate(pieces, start=1):
                start, size = int(self.starts[piece]), int(self.sizes[piece])
                ids = self.documents.read(start, start + size + 1)
                place = number, slice(at, at + size)
                if self.documents.marked:
                    batch["learned"][place] = ids[1:] >= 0
                    ids = unmarked(ids)
                batch["tokens"][place], batch["targets"][place] = ids[:-1], ids[1:]
                batch["segments"][place], batch["positions"][place] = segment, np.arange(size)
                at += size
        return batch

    def split(self, held_out: int = 20) -> tuple[PackedRows, PackedRows]:
        """Returns rows to train on, and one in `held_out` kept from it: the last of each run."""
        is_held_out = self.chosen % held_out == held_out - 1
        first, second = self.chosen[~is_held_out], self.chosen[is_held_out]
        return replace(self, chosen=first), replace(self, chosen=second)


def _greedy(sizes: NDArray[np.int64], length: int) -> NDArray[np.int64]:
    """Returns the first piece of each row, and the end, of pieces no longer than a row."""
    ends = np.cumsum(sizes)
    bounds, filled = [0], 0
    while bounds[-1] < len(sizes):
        bounds.append(int(np.searchsorted(ends, filled + length, side="right")))
        filled = int(ends[bounds[-1] - 1])
    return np.asarray(bounds, np.int64)
