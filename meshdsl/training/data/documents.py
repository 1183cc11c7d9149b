"""Documents of tokens: where each lies, and the ids in it.

Guarantees:
    Only tokens that are read are copied.
    An id outside of the vocabulary is never returned: the error names its file and position.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray


def unmarked(ids: NDArray[np.integer]) -> NDArray[np.integer]:
    """Returns the ids of tokens, learned or not."""
    if ids.dtype.kind == "u":  # all are learned, and -1 is none of its numbers
        return ids
    return np.where(ids < 0, -1 - ids, ids)


@dataclass(frozen=True, eq=False)
class Tokens:
    """The tokens of documents, one after another.

    Attributes:
        name: the file, for errors.
        ids: one-dimensional, integers.
        bounds: the position where each document begins, and the end of the last: [documents + 1].
    """

    name: str
    ids: NDArray[np.integer]
    bounds: NDArray[np.int64]

    @property
    def paths(self) -> tuple[Path, ...]:
        """The files that the ids are read from; none if they are in memory."""
        return ()

    def fingerprint(self) -> str:
        """Returns a hash of the sizes, and of ids at the beginning, in the middle and at the end.

        It is fast for any amount of data, but does not notice every change.
        """
        digest = hashlib.sha256(f"{self.ids.dtype.name} {len(self.ids)}".encode())
        digest.update(np.ascontiguousarray(self.bounds).data)
        middle = len(self.ids) // 2
        for chosen in (slice(0, 4096), slice(middle, middle + 4096), slice(-4096, None)):
            digest.update(np.ascontiguousarray(self.ids[chosen]).data)
        return digest.hexdigest()[:16]


@dataclass(frozen=True, eq=False)
class Documents:
    """Some of the documents of several files, in order.

    Attributes:
        files: the files, whose tokens count as one text, file after file.
        starts: the position where each document begins in that text.
        sizes: the number of tokens in each.
        vocabulary: ids are below it.
        marked: whether tokens that are not learned have the id `-1 - id`; see `chats`.
    """

    files: tuple[Tokens, ...]
    starts: NDArray[np.int64]
    sizes: NDArray[np.int64]
    vocabulary: int
    marked: bool = False

    @cached_property
    def _bases(self) -> NDArray[np.int64]:
        return np.cumsum([0, *(len(file.ids) for file in self.files)])

    @cached_property
    def _ends(self) -> NDArray[np.int64]:
        return np.cumsum(self.sizes)

    @staticmethod
    def of(files: Sequence[Tokens], vocabulary: int, marked: bool = False) -> Documents:
        """Returns all documents with at least one token."""
        bases = np.cumsum([0, *(len(file.ids) for file in files)])
        rows = zip(files, bases, strict=False)
        starts = [np.zeros(0, np.int64), *(file.bounds[:-1] + base for file, base in rows)]
        sizes = [np.zeros(0, np.int64), *(np.diff(file.bounds) for file in files)]
        documents = Documents(
            tuple(files), np.concatenate(starts), np.concatenate(sizes), vocabulary, marked
        )
        return documents.chosen(documents.sizes > 0)

    def __len__(self) -> int:
        return len(self.starts)

    def chosen(self, which: NDArray) -> Documents:
        """Returns some of the documents, by their numbers or by a mask."""
        return replace(self, starts=self.starts[which], sizes=self.sizes[which])

    def read(self, start: int, stop: int) -> NDArray[np.integer]:
        """Returns consecutive tokens of one document, by positions as in `starts`; marked ones too.

        Raises:
            ValueError: an id is outside of the vocabulary; the message has its file and position.
        """
        number = int(np.searchsorted(self._bases, start, side="right")) - 1
        file, base = self.files[number], int(self._bases[number])
        ids = file.ids[start - base : stop - base]
        check_ids(self._unmarked(ids), self.vocabulary, file.name, start - base)
        return ids

    def _unmarked(self, ids: NDArray[np.integer]) -> NDArray[np.integer]:
        return unmarked(ids) if self.marked else ids

    def outside(self, most: int) -> list[str]:
        """Returns the errors that `read` would raise for the first tokens of the files.

        Args:
            most: how many tokens of all files together are checked.
        """
        problems = []
        for number, file in enumerate(self.files):
            share = min(len(file.ids), most // (len(self.files) - number))
            most -= share  # what small files leave is for those behind them
            try:
                for start in range(0, share, 2**22):
                    ids = file.ids[start : min(start + 2**22, share)]
                    check_ids(self._unmarked(ids), self.vocabulary, file.name, start)
            except ValueError as error:
                problems.append(str(error))
        return problems

    def pieces(self, starts: NDArray[np.int64], size: int) -> Iterator[list[tuple[int, int]]]:
        """Yields the positions of runs of `size` tokens, as pieces (start, stop).

        A run that crosses the ends of documents has several pieces.

        Args:
            starts: where runs begin, counted over these documents only.
        """
        ends = self._ends
        for start in starts:
            ranges, left = [], size
            number = int(np.searchsorted(ends, start, side="right"))
            at = int(self.sizes[number] - (ends[number] - start))
            while left:
                first = int(self.starts[number]) + at
                count = min(left, int(self.sizes[number]) - at)
                ranges.append((first, first + count))
                left, at, number = left - count, 0, number + 1
            yield ranges


def check_ids(ids: NDArray[np.integer], vocabulary: int, name: str, start: int) -> None:
    """Checks that ids are in [0, vocabulary).

    Args:
        start: the position of the first id in the file, for the error.

    Raises:
        ValueError: an id is not; the message has the file and the position of the first such.
    """
    if ids.size == 0 or (ids.max() < vocabulary and ids.min() >= 0):
        return
    at = int(np.argmax((ids >= vocabulary) | (ids < 0)))
    raise ValueError(
        f"{name}: token {start + at:,} has the id {ids[at]}, outside of the vocabulary of "
        f"{vocabulary:,}; the data was made with another tokenizer, or the file is damaged"
    )
