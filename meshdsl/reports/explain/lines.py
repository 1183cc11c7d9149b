"""Lines of text: a heading with what hangs behind it, and aligned tables."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence

_WIDTH = 120


def wrapped(head: str, text: str, width: int) -> list[str]:
    """Returns `head` and text behind it, in as many lines as they need."""
    return textwrap.wrap(
        text,
        width,
        initial_indent=head,
        subsequent_indent=" " * len(head),
        break_long_words=False,
        break_on_hyphens=False,
    )


def table(
    rows: Sequence[Sequence[str]], right: Iterable[int], squeezed: int = 0, width: int = _WIDTH
) -> list[str]:
    """Returns rows as aligned lines; the column `squeezed` gives way where they grow too wide."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    excess = 2 + sum(widths) + 2 * (len(widths) - 1) - width
    widths[squeezed] = max(12, widths[squeezed] - max(0, excess))
    rights = set(right)
    lines = []
    for row in rows:
        cells = []
        for i, (cell, room) in enumerate(zip(row, widths, strict=True)):
            if len(cell) > room:
                cell = cell[: room - 1] + "…"
            cells.append(cell.rjust(room) if i in rights else cell.ljust(room))
        lines.append("  " + "  ".join(cells).rstrip())
    return lines
