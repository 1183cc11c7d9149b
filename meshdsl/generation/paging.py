"""Pages: which slots of a shared cache each text of a batch has.

A text has pages for the positions that it has read. It gets another one when it grows out of the
last, and gives those back that its window has left behind.

Invariants:
    No two texts have the same page.
    Pages are handed out in one order, so that the same requests have the same slots.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

PAGE = 16  # slots; a text leaves half of its last page empty on average


@dataclass
class _Text:
    """The text of a row.

    Attributes:
        read: how many of its positions have been read.
        pages: by their number in the text.
    """

    read: int
    pages: dict[int, int] = field(default_factory=dict)


class PageTable:
    """Hands the pages of a cache out to the texts in the rows of a batch.

        table = PageTable(pages=256, rows=8, most=1024)
        table.join(row=2, read=100)   # 7 pages
        table.step()                  # the slot of the next position of each row
        table.leave(row=2)

    Args:
        pages: of the cache.
        most: the most positions of a text.
        window: how many positions back a token sees; None: all.
        page: how many slots a page has.

    Raises:
        ValueError: the cache has no room for one text.
    """

    def __init__(
        self, pages: int, rows: int, most: int, window: int | None = None, page: int = PAGE
    ) -> None:
        self.pages, self.page, self._window, self._most = pages, page, window, most
        peak = max(at // page + 1 - self._first(at) for at in range(most))
        if pages < peak:
            raise ValueError(
                f"a cache of {pages * page:,} tokens has no room for a text of {most:,}: it needs "
                f"{peak * page:,}, in pages of {page}"
            )
        self._free = list(range(pages))
        self._texts: list[_Text | None] = [None] * rows

    @property
    def free(self) -> int:
        """How many pages no text has."""
        return len(self._free)

    def needed(self, read: int) -> int:
        """Returns how many pages a text has of which so many positions have been read."""
        return len(self._numbers(read))

    def fits(self, read: int) -> bool:
        """Whether a text may join: with its next token, and a page for each text that grows."""
        return self.joining([read]) == 1

    def joining(self, reads: Iterable[int]) -> int:
        """Returns how many texts, in this order, may join one after the other; see `fits`."""
        growing, free = sum(text is not None for text in self._texts), self.free
        count = 0
        for read in reads:
            if self.needed(min(read + 1, self._most)) + growing + count > free:
                break
            free -= self.needed(read)
            count += 1
        return count

    def join(self, row: int, read: int) -> NDArray[np.int32]:
        """Takes pages for a text that joins in a row, in place of the one that the row has.

        Returns:
            The page of each page of the text, s32[page]; -1: it has none.

        Raises:
            ValueError: too few pages are free.
        """
        before, numbers = self._texts[row], self._numbers(read)
        free = self.free + (len(before.pages) if before else 0)
        if len(numbers) > free:
            raise ValueError(f"a text of {read} tokens needs {len(numbers)} pages; {free} are free")
        self.leave(row)
        text = self._texts[row] = _Text(read)
        table = np.full(-(-self._most // self.page), -1, np.int32)
        for number in numbers:
            table[number] = text.pages[number] = heapq.heappop(self._free)
        return table

    def leave(self, row: int) -> None:
        """Gives the pages of a row's text back, if there is one."""
        text, self._texts[row] = self._texts[row], None
        for page in text.pages.values() if text else ():
            heapq.heappush(self._free, page)

    @property
    def lacking(self) -> int:
        """How many pages more than are free the next step needs."""
        growing = sum(text is not None and self._grows(text) for text in self._texts)
        return max(0, growing - self.free)

    def step(self) -> NDArray[np.int32]:
        """Returns the slot of the next position of each row, s32[batch]; -1: it has no text.

        A text that has its most positions leaves.

        Raises:
            ValueError: pages are `lacking`.
        """
        if self.lacking:
            raise ValueError(f"the step needs {self.lacking} more pages than are free")
        slots = np.full(len(self._texts), -1, np.int32)
        for row, text in enumerate(self._texts):
            if text is None:
                continue
            if text.read == self._most:
                self.leave(row)
                continue
            if self._grows(text):
                text.pages[text.read // self.page] = heapq.heappop(self._free)
            slots[row] = text.pages[text.read // self.page] * self.page + text.read % self.page
            text.read += 1
        # The step itself may still read the pages that are given back now.
        for text in filter(None, self._texts):
            for number in [n for n in text.pages if n < self._first(text.read)]:
                heapq.heappush(self._free, text.pages.pop(number))
        return slots

    def _grows(self, text: _Text) -> bool:
        """Whether the next step needs another page for a text."""
        return text.read < self._most and text.read // self.page not in text.pages

    def _numbers(self, read: int) -> range:
        """Returns the pages that a text has, by their numbers in it."""
        return range(self._first(read), -(-read // self.page))

    def _first(self, read: int) -> int:
        """Returns the first page that tokens from position `read` on see."""
        return 0 if self._window is None else max(0, read - self._window + 1) // self.page
