"""Blocks: the devices of a mesh as a grid, and what each of them holds of a tensor.

The last axis of the mesh runs along the rows, all others down the columns. At most eight rows and
columns are drawn, so a grid of 4,096 devices is as small as one of 64.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence

from meshdsl.layouts.mesh import Mesh
from meshdsl.layouts.tensor_layout import TensorLayout
from meshdsl.reports.explain.html.elements import Child, Html, tag
from meshdsl.reports.explain.html.strips import axis_colour
from meshdsl.reports.notebook.chips import dim_colour
from meshdsl.tensors.cuts import part
from meshdsl.tensors.dims import Dimension, Shape

_MOST = 8


def _held(
    dim: Dimension, layout: TensorLayout, mesh: Mesh, at: Mapping[str, int]
) -> tuple[int, int]:
    """Returns the positions of a dim, first and past the last, that one device has.

    Args:
        at: the device's index along every axis.
    """
    axes = layout.axes(dim.name)
    return part(dim.size, [mesh.sizes[axis] for axis in axes], [at[axis] for axis in axes])


def tensor_grid(
    shape: Shape, layout: TensorLayout, mesh: Mesh, devices: Sequence[int] | None = None
) -> Html:
    """Returns the grid of devices with the block that each one holds.

    A line of a device is one split dim: its positions, and a bar that shows them in the whole.

    Args:
        devices: the numbers of the devices, in the order of the mesh; None: those of the mesh.
    """
    split = [dim for dim in shape if mesh.extent(layout.axes(dim.name)) > 1]

    def shown(at: Mapping[str, int]) -> list[Child]:
        return [_line(dim, *_held(dim, layout, mesh, at)) for dim in split] or ["the whole"]

    return grid(mesh, shown, devices)


def _line(dim: Dimension, start: int, stop: int) -> Html:
    left, right = (f"{100 * at / dim.size:.4g}%" for at in (start, dim.size - stop))
    bar = tag("span", tag("i", style=f"left: {left}; right: {right}"), class_="bar")
    text = f"{dim.name} {start:,}:{stop:,}" if stop > start else f"{dim.name} only pads"
    return tag("span", bar, text, class_="part", style=f"--dim: {dim_colour(dim.name)}")


def grid(
    mesh: Mesh,
    content: Callable[[Mapping[str, int]], Sequence[Child]] | None = None,
    devices: Sequence[int] | None = None,
) -> Html:
    """Returns the devices of a mesh as a table.

    Args:
        content: what stands below the number of the device with these indices along the axes.
        devices: as in `tensor_grid`.
    """
    *outer, (last, width) = mesh.axes or (("", 1),)
    rows = math.prod(size for _, size in outer)
    drawn = itertools.islice(itertools.product(*(range(size) for _, size in outer)), _MOST)
    lines = []
    for row, places in enumerate(drawn):
        names = [name for name, _ in outer]
        line = [_place(dict(zip(names, places, strict=True)), mesh, "row")] if outer else []
        for column in range(min(width, _MOST)):
            at = {**dict(zip(names, places, strict=True)), last: column}
            device = row * width + column
            number = devices[device] if devices is not None else device
            below = content(at) if content else ()
            line.append(tag("td", tag("b", str(number), class_="device"), below))
        lines.append(tag("tr", line))
    top = [tag("td", class_="corner")] if outer else []
    top += [_place({last: at}, mesh, "col") for at in range(min(width, _MOST))] if last else []
    more = mesh.size - min(rows, _MOST) * min(width, _MOST)
    rest = f"… and {more:,} more devices" if more else None
    return tag(
        "div",
        tag("table", tag("thead", tag("tr", top)), tag("tbody", lines), class_="devices"),
        tag("p", rest, class_="quiet") if rest else None,
        class_="scroll",
    )


def _place(at: Mapping[str, int], mesh: Mesh, scope: str) -> Html:
    parts = [
        tag("span", f"{name} {index}", style=f"--axis: {axis_colour(name, mesh)}", class_="at")
        for name, index in at.items()
    ]
    return tag("th", parts, scope=scope)
