"""Sliding windows over a split dim: what of the operand each device needs, and how it reads it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from meshdsl.layouts.mesh import Mesh
from meshdsl.lowering.communication.exchange import Interval, Run, bounds, gather, local_slice
from meshdsl.lowering.program import Value
from meshdsl.lowering.writing.builder import BlockBuilder
from meshdsl.tensors.dims import Dimension, Shape
from meshdsl.tensors.slide import Slide


@dataclass(frozen=True)
class Cut:
    """A slide of which each device has some positions of the result, or some of the window.

    All devices run one program, so their windows must meet the operands alike. Where the zeros
    between elements would shift them, a device begins some positions early.

    Attributes:
        axes: those that split the dim, major first.
        needs: what each device needs of the operand, by its index along the axes.
        length: how many elements of the operand all have then, met by windows or not.
        slide: how the windows slide over that.
        early: how many positions early each device begins.
        block: how many positions all take, the early ones included.
    """

    axes: tuple[str, ...]
    needs: tuple[tuple[Run, ...], ...]
    length: int
    slide: Slide
    early: tuple[int, ...]
    block: int

    def gather(self, builder: BlockBuilder, value: Value, fill: float = 0) -> Value:
        """Gives every device what it needs of the operand, with `fill` for what lies outside."""
        return gather(builder, [value], self.slide.x, self.axes, self.needs, self.length, fill)

    def widen(self, builder: BlockBuilder, value: Value, name: str) -> Value:
        """Puts before each shard of dim `name` as many zeros as its device begins early."""
        if not any(self.early):
            return value
        dim = value.shape.get(name)
        sizes = [shard.size for shard in bounds(dim.size, self.axes, builder.mesh)]
        ends = tuple(early + size for early, size in zip(self.early, sizes, strict=True))
        params = {"dim": name, "axes": self.axes, "fill": 0}
        parts = ((self.early, self.early, ends),)
        shape = self.wide(value.shape, name, builder.mesh)
        layout = value.layout
        return builder.one("assemble", (value,), shape, value.dtype, layout, parts=parts, **params)

    def wide(self, shape: Shape, name: str, mesh: Mesh) -> Shape:
        """Returns a shape with dim `name` long enough for what the devices take."""
        if not any(self.early):
            return shape
        dim = Dimension(name, self.block * mesh.extent(self.axes))
        return Shape(dim if d.name == name else d for d in shape)

    def narrow(self, builder: BlockBuilder, value: Value, dim: Dimension) -> Value:
        """Returns a result without the positions that the devices began early."""
        if not any(self.early):
            return value
        return local_slice(builder, value, dim.name, self.axes, self.early, dim)


def cut(
    slide: Slide, outs: int, windows: int, by_window: bool, axes: Sequence[str], mesh: Mesh
) -> Cut:
    """Cuts the result's dim, or the window, into the shards of the devices along some axes.

    Args:
        outs, windows: sizes of the result's dim and of the window.
        by_window: whether it is the window that is split.
    """
    size, step = (windows, slide.dilation) if by_window else (outs, slide.stride)
    period = slide.base // math.gcd(slide.base, step)
    held = bounds(size, axes, mesh)
    early = [shard.start % period if shard.size else 0 for shard in held]
    block = -(-size // mesh.extent(axes)) + max(early)

    def elements(count: int) -> Interval:
        """Returns those that `count` positions meet, counted from where they begin."""
        first, last = slide.reach(outs, count) if by_window else slide.reach(count, windows)
        return Interval(-(-first // slide.base), last // slide.base + 1)

    every = elements(block)
    needs = []
    for shard, before in zip(held, early, strict=True):
        met = elements(shard.size + before) if shard.size else Interval(0, 0)
        at = step * (shard.start - before) // slide.base
        run = Run(Interval(at + met.start, at + met.stop), met.start - every.start)
        needs.append((run,) if met.size else ())
    return Cut(
        axes=tuple(axes),
        needs=tuple(needs),
        length=max(1, every.size),
        slide=replace(slide, low=slide.low + slide.base * every.start),
        early=tuple(early),
        block=block,
    )
