"""Which texts a model reads for likelihoods, and which of them share what comes before.

The continuations of a multiple choice follow one context. It is read once, and the rows of its
cache are copied for them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

_LEAST = 8  # tokens of a context; fewer are read again with each text


@dataclass(frozen=True)
class Row:
    """What one text has the programs read.

    Attributes:
        number: of the text.
        source: what an encoder reads.
        text: what is read token by token.
        wanted: the tokens whose likelihood is asked for; they follow the last ones of `text`.
        left_out: how many tokens at the start of the text before it did not fit.
    """

    number: int
    source: Sequence[int]
    text: Sequence[int]
    wanted: Sequence[int]
    left_out: int

    @property
    def context(self) -> Sequence[int]:
        """What is read of `text` before any token that is scored."""
        return self.text[: len(self.text) - len(self.wanted)]

    @property
    def tail(self) -> Sequence[int]:
        """The rest of `text`: a token of `wanted` follows each."""
        return self.text[len(self.text) - len(self.wanted) :]


@dataclass(frozen=True)
class Group:
    """Rows with the same source and context.

    Attributes:
        rows: at least one; the longest first.
    """

    rows: Sequence[Row]

    @property
    def source(self) -> Sequence[int]:
        """What an encoder reads."""
        return self.rows[0].source

    @property
    def context(self) -> Sequence[int]:
        """What all rows have before the tokens that are scored."""
        return self.rows[0].context


def grouped(rows: Sequence[Row], share: bool = True) -> tuple[list[Row], list[Group]]:
    """Returns the rows that are read alone, and those that share a context; the longest first.

    Args:
        share: whether rows may share one; else all are read alone.
    """
    together: dict[tuple, list[Row]] = {}
    for row in rows:
        together.setdefault((tuple(row.source), tuple(row.context)), []).append(row)
    alone, groups = [], []
    for (source, context), members in together.items():
        if share and len(members) > 1 and len(source) + len(context) >= _LEAST:
            groups.append(Group(sorted(members, key=lambda row: len(row.tail), reverse=True)))
        else:
            alone += members
    # The longest first: the memory suffices from the first batch of each kind on, or never.
    alone.sort(key=lambda row: (len(row.source), len(row.text)), reverse=True)
    groups.sort(key=lambda g: (len(g.source), len(g.context), len(g.rows[0].tail)), reverse=True)
    return alone, groups


def batches(groups: Sequence[Group], size: int) -> Iterator[tuple[Sequence[Row], Sequence[int]]]:
    """Yields up to `size` rows of groups at a time, and the number of each one's group."""
    rows = [row for group in groups for row in group.rows]
    numbers = [number for number, group in enumerate(groups) for _ in group.rows]
    for first in range(0, len(rows), size):
        yield rows[first : first + size], numbers[first : first + size]


@dataclass(frozen=True)
class Widths:
    """The positions that programs are compiled for.

    Attributes:
        source: of an encoder.
        context: of a context that texts share.
        text: of what is read after it.
    """

    source: int
    context: int
    text: int

    @property
    def positions(self) -> int:
        """How many a decoder reads."""
        return self.context + self.text


def power_of_two(size: int, least: int) -> int:
    """Returns the smallest power of two that is at least `size`, and `least`, which is one."""
    return max(1 << max(size - 1, 0).bit_length(), least)
