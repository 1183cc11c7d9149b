"""Chips: the names of dims and mesh axes in boxes, each dim in one colour everywhere.

The colour of a dim follows from its name alone, so it is the same in every cell and every session.
The formula is that of `meshdsl explore`. An axis has the colour that reports give it on its mesh;
without a mesh it has none.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

from meshdsl.layouts.mesh import Mesh
from meshdsl.reports.explain.html.elements import Html, tag
from meshdsl.reports.explain.html.strips import axis_colour
from meshdsl.tensors.dims import Dimension, Shape

# Names that many models share: no two of these have like colours.
_USUAL = (
    "batch",
    "length",
    "embed",
    "heads",
    "d_ff",
    "vocab",
    "layers",
    "experts",
    "memory_length",
    "height",
    "width",
    "channels",
)


def dim_colour(name: str) -> str:
    """Returns the CSS colour of a dim."""
    usual = name in _USUAL
    number = _USUAL.index(name) if usual else len(_USUAL) + zlib.crc32(name.encode()) % 348
    return f"hsl({(number * 67 + 212) % 360} 48% 52%)"


def dim_chip(dim: Dimension | str, local: int | None = None, axes: Sequence[str] = ()) -> Html:
    """Returns a dim, or a dim's name, in its colour.

    Args:
        local: how many positions one device has, if these are fewer.
        axes: the axes that split it.
    """
    name = dim if isinstance(dim, str) else dim.name
    size = None
    if not isinstance(dim, str):
        parts = "" if local in (None, dim.size) else f"{local:,}/"
        size = tag("b", f"{parts}{dim.size:,}")
    over = tag("span", f" ÷ {'+'.join(axes)}", class_="quiet") if axes else None
    return tag("span", name, size, over, class_="chip", style=f"--dim: {dim_colour(name)}")


def dim_chips(shape: Shape, local: Shape | None = None) -> Html:
    """Returns the dims of a shape.

    Args:
        local: the shape of what one device has.
    """
    if not shape:
        return tag("span", "no dims", class_="quiet")
    sizes = (local or shape).sizes
    chips = [dim_chip(dim, size) for dim, size in zip(shape, sizes, strict=True)]
    return tag("span", chips, class_="chips")


def axis_chip(name: str, mesh: Mesh | None = None) -> Html:
    """Returns the name of a mesh axis, with its size where the mesh is known."""
    if mesh is None:
        return tag("span", name, class_="axis")
    size = tag("b", f"{mesh.sizes[name]:,}")
    return tag("span", name, size, class_="axis", style=f"--axis: {axis_colour(name, mesh)}")
