"""Windows: documents follow one another as one text, which is cut into runs of `length + 1` tokens.

Each gives `length` inputs and, shifted by one, their targets. Guarantees:
    Windows do not overlap, and together cover the text up to its unfinished last window.
    One window in `held_out` is kept from training, chosen by its position alone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from meshdsl.training.data.checks import check_at_least
from meshdsl.training.data.documents import Documents, unmarked
from meshdsl.training.data.examples import Batch

VOCABULARY = 256
SEPARATOR = 0  # the byte that ends every document


@dataclass(frozen=True, eq=False)
class DocumentWindows:
    """Chosen windows of documents, which are not copied.

    Batches are `tokens` and `targets`: int32 [batch, length]; with marked documents also
    `learned`, 1 where a target is learned, else 0.
    """

    documents: Documents
    length: int
    chosen: NDArray[np.int64]

    @staticmethod
    def of(documents: Documents, length: int) -> DocumentWindows:
        """Returns all windows there are."""
        count = int(documents.sizes.sum()) // (length + 1)
        return DocumentWindows(documents, length, np.arange(count))

    def __len__(self) -> int:
        return len(self.chosen)

    def __getitem__(self, rows: NDArray[np.int64]) -> Batch:
        size = self.length + 1
        text = np.empty((len(rows), size), np.int32)
        places = self.documents.pieces(self.chosen[rows] * size, size)
        for row, pieces in zip(text, places, strict=True):
            at = 0
            for start, stop in pieces:
                row[at : at + stop - start] = self.documents.read(start, stop)
                at += stop - start
        if not self.documents.marked:
            return _shifted(text)
        return _shifted(unmarked(text)) | {"learned": (text[:, 1:] >= 0).astype(np.int32)}

    def split(self, held_out: int = 20) -> tuple[DocumentWindows, DocumentWindows]:
        """Returns windows to train on, and one in `held_out` kept from it: the last of each run."""
        check_at_least(2, held_out=held_out)
        is_held_out = self.chosen % held_out == held_out - 1
        first, second = self.chosen[~is_held_out], self.chosen[is_held_out]
        return replace(self, chosen=first), replace(self, chosen=second)


def _shifted(text: NDArray[np.integer]) -> Batch:
    return {"tokens": text[:, :-1].astype(np.int32), "targets": text[:, 1:].astype(np.int32)}
