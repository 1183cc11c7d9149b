"""Halo exchange: sliding windows over a split dim, and the elements that each device needs."""

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
class HaloExchange:
    """A slide whose result, or whose window, is split along its dim.

    All devices run one program, so their windows must meet the operands at the same offset. Where
    zeros between elements (a dilated operand) would shift it, a device begins some positions early.

    Attributes:
        axes: the axes that split the dim, major first.
        needs: the runs of the operand that each device needs, by its index along the axes.
        length: the local size of the gathered operand, the same on all devices.
        slide: how the windows slide over the gathered operand.
        early: how many positions early each device begins.
        block: how many positions each device computes, the early ones included.
    """

    axes: tuple[str, ...]
    needs: tuple[tuple[Run, ...], ...]
    length: int
    slide: Slide
    early: tuple[int, ...]
    block: int

    def gather(self, builder: BlockBuilder, value: Value, fill: float = 0) -> Value:
        """Gives every device the runs it needs of the operand; `fill` stands outside of the dim."""
        return gather(builder, [value], self.slide.x, self.axes, self.needs, self.length, fill)

    def widen(self, builder: BlockBuilder, value: Value, name: str) -> Value:
        """Puts before each shard of dim `name` as many zeros as its device begins early."""
        if not any(self.early):
            return value
        dim = value.shape.get(name)
        sizes = [shard.size for shard in bounds(dim.size, self.axes, builder.mesh)]
        stops = tuple(early + size for early, size in zip(self.early, sizes, strict=True))
        params = {"dim": name, "axes": self.axes, "fill": 0}
        parts = ((self.early, self.early, stops),)
        shape = self.wide(value.shape, name, builder.mesh)
        layout = value.layout
        return builder.one("assemble", (value,), shape, value.dtype, layout, parts=parts, **params)

    def wide(self, shape: Shape, name: str, mesh: Mesh) -> Shape:
        """Returns a shape whose dim `name` has room for the early positions of all devices."""
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
) -> HaloExchange:
    """Returns the halo exchange of a slide whose result or window is split over some axes.

    Args:
        outs, windows: sizes of the result's dim and of the window.
        by_window: whether the window is split, rather than the result.
    """
    size, step = (windows, slide.dilation) if by_window else (outs, slide.stride)
    period = slide.base // math.gcd(slide.base, step)
    shards = bounds(size, axes, mesh)
    early = [shard.start % period if shard.size else 0 for shard in shards]
    block = -(-size // mesh.extent(axes)) + max(early)

    def elements(count: int) -> Interval:
        """Returns the elements that `count` positions meet, counted from the first position."""
        first, last = slide.reach(outs, count) if by_window else slide.reach(count, windows)
        return Interval(-(-first // slide.base), last // slide.base + 1)

    every = elements(block)
    needs = []
    for shard, before in zip(shards, early, strict=True):
        met = elements(shard.size + before) if shard.size else Interval(0, 0)
        at = step * (shard.start - before) // slide.base
        run = Run(Interval(at + met.start, at + met.stop), met.start - every.start)
        needs.append((run,) if met.size else ())
    return HaloExchange(
        axes=tuple(axes),
        needs=tuple(needs),
        length=max(1, every.size),
        slide=replace(slide, low=slide.low + slide.base * every.start),
        early=tuple(early),
        block=block,
    )
