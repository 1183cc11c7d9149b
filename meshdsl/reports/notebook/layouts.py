"""Layouts: a layout and a mesh in a notebook, the rules one by one, the devices as a grid."""

from __future__ import annotations

import math

from meshdsl.layouts.layout import Layout, Rule
from meshdsl.layouts.mesh import Mesh
from meshdsl.reports.explain.html.elements import Child, Html, joined, tag
from meshdsl.reports.notebook.blocks import grid
from meshdsl.reports.notebook.cells import cell, head, quiet
from meshdsl.reports.notebook.chips import axis_chip, dim_chip

_MOST = 100  # rules


def show_layout(layout: Layout) -> str:
    """Returns a layout as a cell: its line, and what each of its rules does."""
    if not layout.rules:
        return cell(head(quiet("no rules: every device holds every tensor as a whole")))
    rows = [_row(rule) for rule in layout.rules[:_MOST]]
    more = len(layout.rules) - len(rows)
    heads = [tag("th", name, scope="col") for name in ("rule", "dim", "axes", "where")]
    rest = tag("p", f"… and {more:,} more rules", class_="quiet") if more else None
    table = tag("table", tag("thead", tag("tr", heads)), tag("tbody", rows), class_="rules")
    return cell(tag("div", table, class_="scroll"), rest)


def _row(rule: Rule) -> Html:
    axes: Child = quiet("not split")
    if rule.axes:
        axes = joined([axis_chip(rule.axes[0]), *map(_then, rule.axes[1:])])
    words: list[Child] = ["every tensor" if not rule.scope else ["paths with ", _code(rule.scope)]]
    words += [", where no other dim has the axis"] if rule.optional else []
    cells = [_code(str(rule)), dim_chip(rule.dim), axes, words]
    return tag("tr", [tag("td", each) for each in cells])


def _then(axis: str) -> Html:
    return joined([quiet(" then "), axis_chip(axis)])


def _code(text: str) -> Html:
    return tag("code", text)


def show_mesh(mesh: Mesh) -> str:
    """Returns a mesh as a cell: its axes with their sizes, and its devices."""
    if not mesh.axes:
        return cell(head(quiet("a mesh without axes: one device")))
    axes: list[Child] = []
    for name, _ in mesh.axes:
        axes += [axis_chip(name, mesh), quiet(" slow network ") if name in mesh.slow else None]
    count = math.prod(mesh.sizes.values())
    words = f"{count:,} device{'s' if count > 1 else ''}"
    return cell(head(axes, quiet(words)), grid(mesh))
