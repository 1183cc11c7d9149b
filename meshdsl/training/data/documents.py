"""Documents of tokens: where each lies, and the ids in it.

Guarantees:
    Nothing is copied but what is read.
    An id outside of the vocabulary is never returned: it is an error that tells its place.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, eq=False)
class Tokens:
    """The tokens of documents, one after another.

    Attributes:
        name: the file, for errors.
        ids: one-dimensional, integers.
        bounds: where each document begins, and the end of the last: [documents + 1].
    """

    name: str
    ids: NDArray[np.integer]
    bounds: NDArray[np.int64]

    @property
    def paths(self) -> tuple[Path, ...]:
        """The files that the ids stay in; none if they are in memory."""
        return ()

    def fingerprint(self) -> str:
        """Returns a hash of the sizes, and of ids at the beginning, in the middle and at the end.

        It tells different data apart in a moment, however much there is, but not every change.
        """
        found = hashlib.sha256(f"{self.ids.dtype.name} {len(self.ids)}".encode())
        found.update(np.ascontiguousarray(self.bounds).data)
        middle = len(self.ids) // 2
        for chosen in (slice(0, 4096), slice(middle, middle + 4096), slice(-4096, None)):
            found.update(np.ascontiguousarray(self.ids[chosen]).data)
        return found.hexdigest()[:16]


@dataclass(frozen=True, eq=False)
class Documents:
    """Some of the documents of several files, in order.

    Attributes:
        files: their tokens count as one text, file after file.
        starts: where each document begins in that text.
        sizes: the tokens in each.
        vocabulary: ids are below it.
    """

    files: tuple[Tokens, ...]
    starts: NDArray[np.int64]
    sizes: NDArray[np.int64]
    vocabulary: int

    @cached_property
    def _bases(self) -> NDArray[np.int64]:
        return np.cumsum([0, *(len(file.ids) for file in self.files)])

    @cached_property
    def _ends(self) -> NDArray[np.int64]:
        return np.cumsum(self.sizes)

    @staticmethod
    def of(files: Sequence[Tokens], vocabulary: int) -> Documents:
        """Returns all documents of some files that have tokens."""
        bases = np.cumsum([0, *(len(file.ids) for file in files)])
        rows = zip(files, bases, strict=False)
        starts = [np.zeros(0, np.int64), *(file.bounds[:-1] + base for file, base in rows)]
        sizes = [np.zeros(0, np.int64), *(np.diff(file.bounds) for file in files)]
        found = Documents(tuple(files), np.concatenate(starts), np.concatenate(sizes), vocabulary)
        return found.chosen(found.sizes > 0)

    def __len__(self) -> int:
        return len(self.starts)

    def chosen(self, which: NDArray) -> Documents:
        """Returns some of the documents, by number or by truth."""
        return replace(self, starts=self.starts[which], sizes=self.sizes[which])

    def read(self, start: int, stop: int) -> NDArray[np.integer]:
        """Returns a run of tokens, which lies in one document, counted as `starts` are.

        Raises:
            ValueError: an id is outside of the vocabulary; the file and the place are told.
        """
        number = int(np.searchsorted(self._bases, start, side="right")) - 1
        file, base = self.files[number], int(self._bases[number])
        ids = file.ids[start - base : stop - base]
        check_ids(ids, self.vocabulary, file.name, start - base)
        return ids

    def outside(self, most: int) -> list[str]:
        """Returns what is wrong with the first tokens of the files, as `read` would say.

        Args:
            most: how many tokens are looked at, shared among the files.
        """
        problems = []
        for number, file in enumerate(self.files):
            share = min(len(file.ids), most // (len(self.files) - number))
            most -= share  # what small files leave is for those behind them
            try:
                for start in range(0, share, 2**22):
                    ids = file.ids[start : min(start + 2**22, share)]
                    check_ids(ids, self.vocabulary, file.name, start)
            except ValueError as error:
                problems.append(str(error))
        return problems

    def pieces(self, starts: NDArray[np.int64], size: int) -> Iterator[list[tuple[int, int]]]:
        """Yields where runs of `size` tokens lie, counted over these documents only.

        A run that goes over the ends of documents is in several pieces, as (start, stop).
        """
        ends = self._ends
        for start in starts:
            found, left = [], size
            number = int(np.searchsorted(ends, start, side="right"))
            at = int(self.sizes[number] - (ends[number] - start))
            while left:
                first = int(self.starts[number]) + at
                count = min(left, int(self.sizes[number]) - at)
                found.append((first, first + count))
                left, at, number = left - count, 0, number + 1
            yield found


def check_ids(ids: NDArray[np.integer], vocabulary: int, name: str, start: int) -> None:
    """Checks that ids are in [0, vocabulary).

    Args:
        start: the place of the first in the file, for the error.

    Raises:
        ValueError: one is not; the file and the place of the first such are told.
    """
    if ids.size == 0 or (ids.max() < vocabulary and ids.min() >= 0):
        return
    at = int(np.argmax((ids >= vocabulary) | (ids < 0)))
    raise ValueError(
        f"{name}: token {start + at:,} has the id {ids[at]}, outside of the vocabulary of "
        f"{vocabulary:,}; the data was made with another tokenizer, or the file is damaged"
    )
