"""A small canvas that writes SVG: text, boxes, lines, and tensors as grids of their shards.

A tensor's shards are those of `md.inspect`, so a picture shows what lowering would do. Coordinates
are in pixels. The background is white, so that a picture reads on dark pages as well.
"""

from __future__ import annotations

import html
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import meshdsl as md

MONO = "ui-monospace, 'SF Mono', Menlo, Consolas, monospace"
SANS = "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif"
INK, PALE, LINE = "#1f2937", "#6b7280", "#9ca3af"
# By mesh axis: dims that are split over it have its colour, everywhere.
AXES = {
    "data": "#2563eb",
    "model": "#c2410c",
    "pipe": "#0f766e",
    "expert": "#7c3aed",
    "context": "#be185d",
}
# By device, light enough for text on them.
DEVICES = (
    "#bfdbfe",
    "#bbf7d0",
    "#fde68a",
    "#fbcfe8",
    "#ddd6fe",
    "#a5f3fc",
    "#fed7aa",
    "#d1d5db",
)
MONO_WIDTH = 0.602  # of a character, in font sizes


@dataclass
class Canvas:
    """A picture of a size; `title` is read to those who do not see it."""

    width: int
    height: int
    title: str
    parts: list[str] = field(default_factory=list)

    def text(
        self,
        x: float,
        y: float,
        words: str,
        size: int = 14,
        colour: str = INK,
        mono: bool = False,
        bold: bool = False,
        anchor: str = "start",
    ) -> None:
        """Writes a line of text; y is its baseline."""
        family = MONO if mono else SANS
        weight = ' font-weight="600"' if bold else ""
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" font-family="{family}" font-size="{size}" fill="{colour}"'
            f'{weight} text-anchor="{anchor}" xml:space="preserve">{html.escape(words)}</text>'
        )

    def words(self, x: float, y: float, words: Sequence[tuple[str, str]], size: int = 14) -> float:
        """Writes words of several colours in one line, in a monospaced font; returns its end."""
        spans = "".join(
            f'<tspan fill="{colour}">{html.escape(text)}</tspan>' for text, colour in words
        )
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" font-family="{MONO}" font-size="{size}"'
            f' xml:space="preserve">{spans}</text>'
        )
        return x + MONO_WIDTH * size * sum(len(text) for text, _ in words)

    def box(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        fill: str = "none",
        stroke: str = LINE,
        thick: float = 1,
        dashed: bool = False,
    ) -> None:
        """Draws a rectangle."""
        dashes = ' stroke-dasharray="3 3"' if dashed else ""
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill="{fill}"'
            f' stroke="{stroke}" stroke-width="{thick:g}"{dashes}/>'
        )

    def arrow(self, x: float, y: float, to_x: float, to_y: float, colour: str = PALE) -> None:
        """Draws a line with a head."""
        self.parts.append(
            f'<line x1="{x:g}" y1="{y:g}" x2="{to_x:g}" y2="{to_y:g}" stroke="{colour}"'
            ' stroke-width="1.5" marker-end="url(#head)"/>'
        )

    def __str__(self) -> str:
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}"'
            f' width="{self.width}" height="{self.height}" role="img">'
            f"<title>{html.escape(self.title)}</title>"
            '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7"'
            f' markerHeight="7" orient="auto"><path d="M0 0L8 4L0 8z" fill="{PALE}"/></marker>'
            "</defs>"
            f'<rect width="{self.width}" height="{self.height}" rx="8" fill="#ffffff"/>'
        )
        return "\n".join([head, *self.parts, "</svg>"]) + "\n"


def colour_of(layout: md.Layout, dim: str) -> str:
    """Returns the colour of a dim: that of the first axis which splits it, else that of text."""
    axes = next((rule.axes for rule in layout.rules if rule.dim == dim), ())
    return AXES[axes[0]] if axes else INK


@dataclass(frozen=True)
class Shard:
    """A part of a tensor: where it is (as shares of its dims), and on which devices."""

    rows: tuple[float, float]
    columns: tuple[float, float]
    devices: tuple[int, ...]
    pads: tuple[int, int]


def shards(spec: md.Spec, mesh: str, layout: str) -> Iterator[Shard]:
    """Yields the shards of a tensor with one or two dims, pads at their ends included."""
    inspection = md.inspect(spec, mesh, layout)
    split = [dim.name for dim in inspection.split]
    for block, devices in inspection.blocks.items():
        ranges = dict(zip(split, block, strict=True))
        spans, pads = [], []
        for dim in spec.dims:
            start, stop, more = ranges.get(dim.name, (0, dim.size, 0))
            spans.append((start / dim.size, stop / dim.size))
            pads.append(more)
        if len(spans) == 1:
            spans, pads = [(0.0, 1.0), *spans], [0, *pads]
        yield Shard(spans[0], spans[1], tuple(devices), (pads[0], pads[1]))


def tensor(
    canvas: Canvas,
    corner: tuple[float, float],
    size: tuple[float, float],
    spec: md.Spec,
    mesh: str,
    layout: str,
    only: int | None = None,
    labels: bool = True,
) -> None:
    """Draws a tensor as a grid of its shards.

    Args:
        size: width and height; the last dim is from left to right, the first from top to bottom.
        only: a device, to colour its shard alone.
        labels: whether shards say which devices hold them.
    """
    (x, y), (width, height) = corner, size
    colours = itertools.cycle(DEVICES)
    for shard, colour in zip(shards(spec, mesh, layout), colours, strict=False):
        top, bottom = (y + height * share for share in shard.rows)
        left, right = (x + width * share for share in shard.columns)
        shown = only is None or only in shard.devices
        fill = "#f3f4f6" if not shown else colour if only is None else "#86efac"
        canvas.box(left, top, right - left, bottom - top, fill=fill, stroke="#4b5563", thick=0.8)
        if labels:
            names = " ".join(map(str, shard.devices))
            middle = (left + right) / 2, (top + bottom) / 2 + 4
            canvas.text(*middle, names, size=12, mono=True, anchor="middle")
