"""Elements: HTML as values, escaped wherever text goes in.

`Html` is text that is markup already; every other string is escaped by `tag`, in attributes as
well. So what a user's program contains can be shown, and is never markup.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from meshdsl.lowering.costs.units import show_bytes
from meshdsl.tracing.source import Source

_EMPTY = frozenset(["input", "meta"])
_CLOSED = frozenset(["line", "path", "rect"])  # empty elements of SVG, which a slash closes
_COUNTER = re.compile(r"(\.\d+\b)")  # of a name that a program has more than once
_MOST_BESIDE = 4  # columns that a narrow screen has room for
_MANY = 10  # columns whose heads take several lines
_FLAG = re.compile(r"(--\w+)")  # lines break behind hyphens, but not in a flag


class Html(str):
    """Markup that is safe to insert as it is."""

    __slots__ = ()


Child: TypeAlias = "Html | str | Iterable[Child] | None"


def tag(name: str, /, *children: Child, **attributes: str | float | bool | None) -> Html:
    """Returns one element.

        tag("td", "a < b", class_="number", data_sort=1.5)

    Args:
        attributes: `class_` is `class`, other underscores are dashes; None and False are left out.
    """
    opening = [name]
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        key = key.rstrip("_").replace("_", "-")
        opening.append(key if value is True else f'{key}="{html.escape(_plain(value))}"')
    if name in _CLOSED:
        return Html(f"<{' '.join(opening)}/>")
    start = f"<{' '.join(opening)}>"
    return Html(start if name in _EMPTY else f"{start}{joined(children)}</{name}>")


def _plain(value: str | float) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def joined(children: Iterable[Child]) -> Html:
    """Returns children one after the other; strings are escaped, None is left out."""
    parts = []
    for child in children:
        if isinstance(child, Html):
            parts.append(str(child))
        elif isinstance(child, str):
            parts.append(html.escape(child))
        elif child is not None:
            parts.append(joined(child))
    return Html("".join(parts))


def code(text: str) -> Html:
    """Returns text as code; it may break behind a slash."""
    return tag("code", _breakable(text))


def _breakable(text: str) -> Html:
    return Html("/<wbr>".join(html.escape(part) for part in text.split("/")))


def value_names(names: str, title: str = "") -> Html:
    """Returns names of values, as the program has them; the numbers that tell equal ones apart are
    small: `x.27` is the 27th `x` of `print(program)`.

    Args:
        names: one or several, with commas.
        title: what shows where the mouse rests.
    """
    parts = _COUNTER.split(names)
    shown = [tag("small", p, class_="quiet") if n % 2 else p for n, p in enumerate(parts)]
    return tag("code", shown, title=title or None)


def ticked(text: str) -> Html:
    """Returns a sentence whose words in backticks are code."""
    parts = text.split("`")
    if len(parts) % 2 == 0:  # a backtick without its pair
        return _flagged(text)
    return joined(code(part) if n % 2 else _flagged(part) for n, part in enumerate(parts))


def _flagged(text: str) -> Html:
    parts = _FLAG.split(text)
    return joined(tag("span", p, class_="flag") if n % 2 else p for n, p in enumerate(parts))


def place(source: Source, phase: bool = True) -> Html:
    """Returns a line of the source; the text of that line shows where the mouse rests.

    Args:
        phase: whether to say that it is about the backward pass.
    """
    if not source.line:
        return tag("span", "–", class_="quiet")
    shown = str(source) if phase else source.place
    return tag("code", _breakable(shown), class_="place", title=source.code or None)


def line(source: Source) -> Html:
    """Returns a line of the source for a table: its place, and its text below."""
    says = tag("code", source.code, class_="says") if source.line and source.code else None
    return joined([place(source, phase=False), says])


def facts(pairs: Iterable[tuple[str, Child]], kind: str = "facts") -> Html:
    """Returns names with one fact about each, in two columns."""
    return tag("dl", [[tag("dt", name), tag("dd", fact)] for name, fact in pairs], class_=kind)


@dataclass(frozen=True)
class Cell:
    """One cell of a table: what it shows, and what it is sorted by.

    Attributes:
        order: a number; cells without one are sorted by their text.
    """

    content: Child
    order: float | None = None


def byte_cell(count: float) -> Cell:
    """Returns a cell with bytes."""
    return Cell(show_bytes(count), count)


@dataclass(frozen=True)
class Column:
    """One column: its head, whether it holds numbers, and whether its bytes are added up below."""

    head: str
    number: bool = False
    total: bool = False


def table(
    label: str,
    columns: Sequence[Column],
    rows: Sequence[Sequence[Cell | Child]],
    filtered: bool = True,
) -> Html:
    """Returns a table that is sorted by a click on a head, with a box that filters its rows.

    On a narrow screen, each row of a table with many columns is a card: its cells stand below each
    other, each beside the head of its column.

    Args:
        label: what it holds, for those who do not see it.
    """
    heads = [
        tag(
            "th",
            tag("button", column.head, type="button") if column.head else None,
            scope="col",
            class_="number" if column.number else None,
        )
        for column in columns
    ]
    cards = len(columns) > _MOST_BESIDE
    kinds = [
        "sortable",
        *(["cards"] if cards else []),
        *(["many"] if len(columns) >= _MANY else []),
    ]
    lines = [
        tag("tr", [_cell(cell, column, cards) for cell, column in zip(row, columns, strict=True)])
        for row in rows
    ]
    box = tag(
        "p",
        tag(
            "label",
            tag("span", "filter", class_="quiet"),
            tag("input", type="search", placeholder="any text", aria_label=f"filter {label}"),
        ),
        tag("span", f"{len(rows):,} rows", class_="quiet count", role="status"),
        class_="filter",
    )
    return tag(
        "div",
        box if filtered and len(rows) > 1 else None,
        tag(
            "div",
            tag(
                "table",
                tag("thead", tag("tr", heads)),
                tag("tbody", lines),
                _foot(columns, rows, cards),
                class_=" ".join(kinds),
                aria_label=label,
            ),
            class_="scroll",
        ),
        class_="table",
    )


def _cell(cell: Cell | Child, column: Column, cards: bool) -> Html:
    known = cell if isinstance(cell, Cell) else Cell(cell)
    kind = "number" if column.number else None
    if not cards or not known.content:
        return tag("td", known.content, class_=kind, data_order=known.order)
    content = tag("div", known.content)  # one child, which stands beside the head
    return tag("td", content, class_=kind, data_order=known.order, data_head=column.head or None)


def _foot(
    columns: Sequence[Column], rows: Sequence[Sequence[Cell | Child]], cards: bool
) -> Html | None:
    if not any(column.total for column in columns) or len(rows) < 2:
        return None
    cells = []
    for number, column in enumerate(columns):
        text: str | None = "total" if number == 0 else None
        if column.total:
            column_cells = (row[number] for row in rows)
            text = show_bytes(sum(c.order or 0 for c in column_cells if isinstance(c, Cell)))
        kinds = " ".join(
            name for name, on in (("number", column.number), ("sum", column.total)) if on
        )
        head = column.head if cards and column.total else None
        cells.append(tag("td", text, class_=kinds or None, data_head=head))
    return tag("tfoot", tag("tr", cells))
