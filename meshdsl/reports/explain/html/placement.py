"""Placement: where a tensor is on the mesh, drawn by axes rather than by devices.

Every mesh axis has a column. Where the axis splits a dim its bar is cut, one piece for each block
(at most eight are drawn); where all its devices hold the same, the bar is one piece. Beside it the
tensor itself: its first two split dims as rows and columns, with the block of one device filled.
So a drawing has the same size on 4 devices and on 4,096, and for any number of axes.
"""

from __future__ import annotations

from meshdsl.layouts.mesh import Mesh
from meshdsl.lowering.program import Value
from meshdsl.reports.explain.html.elements import Html, joined, tag
from meshdsl.reports.explain.html.strips import axis_colour
from meshdsl.reports.explain.pads import padded_dims
from meshdsl.tensors.dtypes import short

_MOST_PIECES = 8
_MOST_LINES = 16
_WIDTH, _HEIGHT = 46, 30


def type_of(value: Value, mesh: Mesh) -> str:
    """Returns dtype and dims, local over global where they differ."""
    return short(value.dtype) + value.layout.complete().show(value.shape, mesh)


def axis_bar(value: Value, axis: str, mesh: Mesh) -> Html:
    """Returns what one mesh axis does to a value."""
    size, dim = mesh.sizes[axis], value.layout.dim_of(axis)
    if dim is None:
        label = f"axis {axis}: all {size} devices hold the same" if size > 1 else "one device"
        text = tag("span", f"{size:,} copies" if size > 1 else "–", class_="quiet")
        return tag("div", tag("div", tag("i"), class_="pieces"), text, class_="axis", title=label)
    axes = value.layout.axes(dim)
    padded = any(one.dim.name == dim for one in padded_dims(value, mesh))
    pieces = [tag("i") for _ in range(min(size, _MOST_PIECES))]
    if padded:
        pieces[-1] = tag("i", class_="pad")
    order = f" ({axes.index(axis) + 1} of {len(axes)})" if len(axes) > 1 else ""
    title = f"axis {axis} splits {dim} into {size:,} blocks{order}"
    title += "; the last ones hold pads" if padded else ""
    return tag(
        "div",
        tag("div", pieces, class_="pieces cut", style=f"color: {axis_colour(axis, mesh)}"),
        tag("span", tag("b", dim), f" ÷{size:,}{order}"),
        class_="axis",
        title=title,
    )


def block_drawing(value: Value, mesh: Mesh) -> Html:
    """Returns the tensor as a sheet, or several behind each other, with one device's block."""
    cuts = [
        (dim, mesh.extent(axes))
        for dim, axes in ((d.name, value.layout.axes(d.name)) for d in value.shape)
        if mesh.extent(axes) > 1
    ]
    rows = cuts[0][1] if cuts else 1
    columns = cuts[1][1] if len(cuts) > 1 else 1
    if len(cuts) == 1 and cuts[0][0] != value.shape[0].name:
        rows, columns = 1, rows  # a split of a later dim cuts columns
    sheets = min(3, 1 + len(cuts[2:]))
    words = [f"{count:,} blocks of {dim}" for dim, count in cuts] or ["the whole on every device"]
    parts = [
        tag("rect", x=4.0 * n + 0.5, y=6.5 - 3.0 * n, width=_WIDTH, height=_HEIGHT, class_="sheet")
        for n in reversed(range(sheets))
    ]
    height, width = _HEIGHT / rows, _WIDTH / columns
    parts.append(
        tag(
            "rect",
            x=0.5,
            y=6.5,
            width=max(width, 1.5),
            height=max(height, 1.5),
            class_="own",
        )
    )
    for n in range(1, min(rows, _MOST_LINES)):
        y = 6.5 + _HEIGHT * n / min(rows, _MOST_LINES)
        parts.append(tag("line", x1=0.5, x2=_WIDTH + 0.5, y1=y, y2=y))
    for n in range(1, min(columns, _MOST_LINES)):
        x = 0.5 + _WIDTH * n / min(columns, _MOST_LINES)
        parts.append(tag("line", x1=x, x2=x, y1=6.5, y2=_HEIGHT + 6.5))
    title = "one device holds 1 of " + " × ".join(words) if cuts else words[0]
    return tag(
        "svg",
        tag("title", title),
        parts,
        class_="block",
        viewBox=f"0 0 {_WIDTH + 10} {_HEIGHT + 8}",
        width=_WIDTH + 10,
        height=_HEIGHT + 8,
        role="img",
        aria_label=title,
    )


def mesh_drawing(mesh: Mesh) -> Html:
    """Returns the axes of a mesh with their sizes and colours, major first."""
    if not mesh.axes:
        return Html("")
    return joined(
        tag(
            "span",
            tag("i", style=f"background: {axis_colour(name, mesh)}"),
            tag("b", name),
            f" {size:,}",
            tag("span", " slow network", class_="quiet") if name in mesh.slow else None,
            class_="axis-name",
        )
        for name, size in mesh.axes
    )
