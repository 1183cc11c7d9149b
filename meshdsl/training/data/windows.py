"""Windows: documents follow one another as one text, which is cut into runs of `length + 1` tokens.

Each gives `length` inputs and, shifted by one, their targets. Guarantees:
    Windows do not overlap, and together cover the text up to its unfinished last window.
    One window in `held_out` is kept from training, chosen by its position alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from meshdsl.training.data.checks import check_at_least
from meshdsl.training.data.documents import Documents
from meshdsl.training.data.examples import Batch

VOCABULARY = 256
SEPARATOR = 0  # the byte that ends every document


@dataclass(frozen=True, eq=False)
class Windows:
    """Chosen windows of a text, as `tokens` and `targets`: int32 [batch, length].

    Attributes:
        text: [windows, length + 1], every window of the corpus.
        chosen: the rows of `text` that belong to this split.
    """

    text: NDArray[np.integer]
    chosen: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.chosen)

    def __getitem__(self, rows: NDArray[np.int64]) -> Batch:
        return _shifted(self.text[self.chosen[rows]])


@dataclass(frozen=True, eq=False)
class DocumentWindows:
    """Chosen windows of documents, which stay where they are; batches as of `Windows`."""

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
        return _shifted(text)

    def split(self, held_out: int = 20) -> tuple[DocumentWindows, DocumentWindows]:
        """Returns windows to train on, and one in `held_out` kept from it: the last of each run."""
        check_at_least(2, held_out=held_out)
        is_held_out = self.chosen % held_out == held_out - 1
        first, second = self.chosen[~is_held_out], self.chosen[is_held_out]
        return replace(self, chosen=first), replace(self, chosen=second)


@dataclass(frozen=True, eq=False)
class ByteCorpus:
    """The bytes of all documents, each followed by `SEPARATOR`, held in memory once."""

    text: NDArray[np.uint8]

    @staticmethod
    def read(files: Iterable[Path]) -> ByteCorpus:
        """Reads documents in the order given."""
        text = bytearray()
        for file in files:
            text += file.read_bytes()
            text.append(SEPARATOR)
        corpus = ByteCorpus(np.frombuffer(text, np.uint8))
        corpus.text.flags.writeable = False
        return corpus

    def split(self, length: int, *, batch_size: int, held_out: int = 20) -> tuple[Windows, Windows]:
        """Cuts the text into windows to train on, and windows held out from training.

        Args:
            length: tokens in a window.
            batch_size: the windows that each of the two must have at least.
            held_out: one window in this many is held out: the last of each run of that length.

        Returns:
            The windows to train on and the held-out ones.

        Raises:
            ValueError: the text is too short, or a number is out of range.
        """
        check_at_least(1, length=length, batch_size=batch_size)
        check_at_least(2, held_out=held_out)
        size = length + 1
        needed = held_out * batch_size * size
        if self.text.size < needed:
            raise ValueError(
                f"the text is too short: it has {self.text.size:,} bytes, and "
                f"batch_size={batch_size} with length={length} needs {needed:,}\n"
                f"  ({batch_size} held-out windows of {size} bytes, one window in {held_out} being "
                "held out).\n"
                "  Give more text, or a smaller batch_size or length."
            )
        count = self.text.size // size
        windows = self.text[: count * size].reshape(count, size)
        rows = np.arange(count)
        is_held_out = rows % held_out == held_out - 1
        return Windows(windows, rows[~is_held_out]), Windows(windows, rows[is_held_out])


def _shifted(text: NDArray[np.integer]) -> Batch:
    return {"tokens": text[:, :-1].astype(np.int32), "targets": text[:, 1:].astype(np.int32)}
