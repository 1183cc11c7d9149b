"""Graphs: a traced program in a notebook, one row for what one source line computes.

The rows are those of `str(graph)`, with dims in their colours. A long program is cut.
"""

from __future__ import annotations

import re

from meshdsl.reports.explain.html.elements import Child, Html, tag
from meshdsl.reports.notebook.cells import cell, head, quiet
from meshdsl.reports.notebook.chips import dim_chip
from meshdsl.tensors.dims import Dimension
from meshdsl.tracing.graph import Graph
from meshdsl.tracing.printing import Row, operation_count, rows_of

_MOST = 300  # rows
_DIMS = re.compile(r"\[([^\[\]]*)\]")
_DIM = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=(\d+)")


def show(graph: Graph) -> str:
    """Returns a graph as a cell."""
    rows = rows_of(graph)
    heads = [tag("th", name, scope="col") for name in ("value", "type", "line")]
    body = tag("tbody", [_row(row) for row in rows[:_MOST]])
    table = tag("table", tag("thead", tag("tr", heads)), body, class_="graph")
    more = len(rows) - _MOST
    rest = tag("p", f"… and {more:,} more lines", class_="quiet") if more > 0 else None
    count = operation_count(graph)
    first = head(tag("b", graph.name or "graph"), quiet(f"{count:,} operations"))
    return cell(first, tag("div", table, class_="scroll tall"), rest)


def _row(row: Row) -> Html:
    formula, kind, place = row
    indent = len(formula) - len(formula.lstrip())
    style = f"padding-left: {8 + 6 * indent}px" if indent else None
    cells = [tag("td", tag("code", formula.strip()), style=style), tag("td", types(kind))]
    return tag("tr", cells, tag("td", tag("code", place), class_="quiet"))


def types(text: str) -> list[Child]:
    """Returns dtypes and dims, as `f32[batch=8]`, with each dim as a chip."""
    parts: list[Child] = []
    end = 0
    for found in _DIMS.finditer(text):
        parts.append(tag("code", text[end : found.start()]))
        sizes = _DIM.findall(found[1])
        parts.append(
            tag("span", [dim_chip(Dimension(n, int(s))) for n, s in sizes], class_="chips")
        )
        end = found.end()
    return [*parts, tag("code", text[end:]) if text[end:] else None]
