"""Segments: sums, extremes and means of elements that belong together, by an index for each.

They are scatters into zeros (or minus infinities), so elements with an out-of-range segment are
left out. Over a split dim of elements, only one reduction of the result moves data.
"""

from __future__ import annotations

import numpy as np

from meshdsl.ops.creation import ones, sized
from meshdsl.ops.elementwise.arithmetic import cast, maximum
from meshdsl.ops.elementwise.broadcasting import need_dims
from meshdsl.ops.indexing import SCATTER_ADD, SCATTER_MAX, SCATTER_MIN, narrow
from meshdsl.ops.operation import operation
from meshdsl.ops.reductions.reduction import need_float, need_order
from meshdsl.tensors.dims import Dimension, DimsLike, Shape
from meshdsl.tensors.dtypes import accumulator
from meshdsl.tensors.tensor import Tensor
from meshdsl.tracing.graph import Primitive
from meshdsl.tracing.trace import bind_one


@operation
def segment_sum(
    x: Tensor, segments: Tensor, into: Dimension, over: DimsLike | None = None
) -> Tensor:
    """Returns the sums of the elements of each segment: `md.segment_sum(x, graph, graphs)`.

    Args:
        segments: for each place, the index of its segment along `into`.
        over: the dims of `segments` to sum over, by default all; its other dims pair up with x's.

    Returns:
        x's dims with `into` where the first of the dims summed over stood. Elements with a segment
        outside of [0, size) are left out.

    Raises:
        ValueError: segments that are not integers or have dims that x lacks, dims that differ in
            size, or x has `into` as a dim that is not summed over.

    Examples:
        >>> energy = md.named([1.0, 2.0, 5.0], ["atom"])
        >>> graph = md.named([0, 0, 1], ["atom"])
        >>> print(md.segment_sum(energy, graph, md.Dimension("graphs", 2)))
        f32[graphs=2] [3. 5.]
    """
    return _segment(SCATTER_ADD, x, segments, into, over)


@operation
def segment_max(
    x: Tensor, segments: Tensor, into: Dimension, over: DimsLike | None = None
) -> Tensor:
    """Returns the maximum of each segment; see `segment_sum`.

    An empty segment gives minus infinity, or the smallest integer. The gradient is divided among
    the elements that equal the maximum.

    Raises:
        ValueError: x is complex; or as for `segment_sum`.

    Examples:
        >>> energy = md.named([1.0, 2.0, 5.0], ["atom"])
        >>> graph = md.named([0, 0, 1], ["atom"])
        >>> print(md.segment_max(energy, graph, md.Dimension("graphs", 2)))
        f32[graphs=2] [2. 5.]
    """
    need_order(x)
    return _segment(SCATTER_MAX, x, segments, into, over)


@operation
def segment_min(
    x: Tensor, segments: Tensor, into: Dimension, over: DimsLike | None = None
) -> Tensor:
    """Returns the minimum of each segment; see `segment_max`.

    Raises:
        ValueError: x is complex; or as for `segment_sum`.

    Examples:
        >>> energy = md.named([1.0, 2.0, 5.0], ["atom"])
        >>> graph = md.named([0, 0, 1], ["atom"])
        >>> print(md.segment_min(energy, graph, md.Dimension("graphs", 2)))
        f32[graphs=2] [1. 5.]
    """
    need_order(x)
    return _segment(SCATTER_MIN, x, segments, into, over)


@operation
def segment_mean(
    x: Tensor, segments: Tensor, into: Dimension, over: DimsLike | None = None
) -> Tensor:
    """Returns the mean of each segment, 0 where it is empty; see `segment_sum`.

    Half precision is summed in float32.

    Raises:
        ValueError: x is not floating-point; or as for `segment_sum`.

    Examples:
        >>> energy = md.named([1.0, 2.0, 5.0], ["atom"])
        >>> graph = md.named([0, 0, 1], ["atom"])
        >>> print(md.segment_mean(energy, graph, md.Dimension("graphs", 3)))
        f32[graphs=3] [1.5 5.  0. ]
    """
    need_float(x)
    wide = cast(x, accumulator(x.dtype))
    total = _segment(SCATTER_ADD, wide, segments, into, over)
    count = _segment(SCATTER_ADD, ones(segments.shape, wide.dtype), segments, into, over)
    return cast(total / maximum(count, 1), x.dtype)


def _segment(
    primitive: Primitive, x: Tensor, segments: Tensor, into: Dimension, over: DimsLike | None
) -> Tensor:
    (into,) = sized(into)
    segments = narrow(segments, into.size)
    if x.dtype == np.bool_:
        raise ValueError("needs numbers, got bool; cast first, as in md.cast(x, 'int32')")
    gone = segments.shape if over is None else segments.shape.select(over)
    for each in segments.shape:
        if x.shape.find(each.name) not in (None, each):
            raise ValueError(
                f"dim `{each.name}` has size {x.shape.get(each.name).size} in x but {each.size} "
                "in the segments"
            )
    need_dims(segments, "the segments", x, "x", "broadcast x first, as in md.broadcast(x, dims)")
    first = min((x.shape.position(d.name) for d in gone), default=0)
    remaining = [d for d in x.shape if d not in gone]
    before = sum(d in remaining for d in x.shape[:first])
    shape = Shape([*remaining[:before], into, *remaining[before:]])
    return bind_one(primitive, (x, segments), {"dim": into.name, "shape": shape})
