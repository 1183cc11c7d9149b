"""Inspections: the figure of `md.inspect`, where the blocks of an array are, as a cell."""

from __future__ import annotations

import itertools

from meshdsl.reports.explain.html.elements import Child, Html, joined, tag
from meshdsl.reports.notebook.cells import cell
from meshdsl.running.inspection import Inspection

_COLOURS = 8  # of blocks, one after the other: those of `cells.css`


def show(figure: Inspection) -> str:
    """Returns the figure of an array: its lines, and tables with a colour for each block."""
    heads = [tag("div", line) for line in figure.heads()]
    numbers = itertools.cycle(range(_COLOURS))
    tables = [
        tag("table", tag("caption", title) if title else None, [
            tag("tr", [_cell(text, kind, numbers) for text, kind in row]) for row in rows
        ], class_="blocks")
        for title, rows in figure.pages()
    ]  # fmt: skip
    return cell(heads, tag("div", tables, class_="scroll"))


def _cell(text: str, kind: str, numbers: itertools.cycle[int]) -> Html:
    if kind == "head":
        return tag("th", text)
    lines: list[Child] = [tag("div", line) for line in text.split("\n")]
    return tag("td", joined(lines), style=f"background: var(--block-{next(numbers)})")
