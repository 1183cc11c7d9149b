"""Cells: the frame of everything that a notebook's cell shows.

A cell has its style with it, and its rules stand below `.meshdsl-cell`, so that they change nothing
around it. It needs no script.
"""

from __future__ import annotations

from functools import cache
from importlib import resources

from meshdsl.reports.explain.html.elements import Child, Html, tag
from meshdsl.reports.explain.html.page import file


def cell(*content: Child) -> str:
    """Returns the HTML of a cell: `cell(tag("p", "8 < 9"))`."""
    return str(tag("div", tag("style", Html(_style())), content, class_="meshdsl-cell"))


def head(*content: Child) -> Html:
    """Returns the first line of a cell."""
    return tag("div", content, class_="head")


def quiet(text: str) -> Html:
    """Returns text in grey."""
    return tag("span", text, class_="quiet")


@cache
def _style() -> str:
    own = resources.files(__package__).joinpath("cells.css").read_text(encoding="utf-8")
    return file("colours.css") + own
