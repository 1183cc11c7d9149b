"""Counting and finding: count_nonzero, bincount, searchsorted, histogram, nonzero."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from meshdsl.ops.creation import arange, ones, sized
from meshdsl.ops.elementwise.arithmetic import cast, less, less_equal, logical_and, where
from meshdsl.ops.elementwise.broadcasting import need_dims, outer
from meshdsl.ops.indexing import SCATTER_ADD
from meshdsl.ops.literal import literal
from meshdsl.ops.operation import operation
from meshdsl.ops.reductions.cumulative import cumsum
from meshdsl.ops.reductions.reduction import need_bool, sum
from meshdsl.ops.reductions.segments import segment_sum
from meshdsl.ops.shapes.shape import broadcast
from meshdsl.tensors.dims import Dimension, DimLike, DimsLike, Shape, unused
from meshdsl.tensors.dtypes import is_float, short
from meshdsl.tensors.named_array import named
from meshdsl.tensors.tensor import Tensor
from meshdsl.tracing.trace import bind_one


@operation
def count_nonzero(x: Tensor, over: DimsLike | None = None) -> Tensor:
    """Returns how many elements over some dims, or over all, are true or not zero, as s32.

    Raises:
        ValueError: x lacks a dim.

    Examples:
        >>> x = md.named([[0, 1, 2], [0, 0, 3]], ["batch", "length"])
        >>> print(md.count_nonzero(x, over="length"))
        s32[batch=2] [2 1]
    """
    true = x if x.dtype == np.bool_ else x != 0
    return sum(cast(true, "int32"), over)


@operation
def bincount(
    indices: Tensor, into: Dimension, over: DimsLike | None = None, weights: Tensor | None = None
) -> Tensor:
    """Returns how often each index of `into` occurs: `md.bincount(expert, experts)`.

    Args:
        over: the dims of `indices` to count along, by default all; the others are kept.
        weights: what each occurrence counts instead of 1; they have some of the indices' dims, or
            all of them and more.

    Returns:
        s32 counts, or sums of the weights' dtype. Indices outside of [0, size) are not counted.

    Raises:
        ValueError: the weights and the indices each have a dim that the other lacks; or as for
            `segment_sum`.

    Examples:
        >>> expert = md.named([0, 2, 2, 7], ["token"])
        >>> print(md.bincount(expert, md.Dimension("experts", 3)))
        s32[experts=3] [1 0 2]
    """
    if weights is None:
        return segment_sum(ones(indices.shape, "int32"), indices, into, over)
    missing = indices.shape.without(weights.shape.names)
    if missing:
        advice = "broadcast them to the indices' dims first, as in md.broadcast(weights, dims)"
        need_dims(weights, "the weights", indices, "the tensor of indices", advice)
        weights = broadcast(weights, [*missing, *weights.shape])
    return segment_sum(weights, indices, into, over)


@operation
def searchsorted(
    ordered: Tensor, values: Tensor, dim: DimLike | None = None, side: str = "left"
) -> Tensor:
    """Returns where values go into a sorted tensor, as s32: `md.searchsorted(edges, x)`.

    Every value is compared with every element, so `ordered` should be short.

    Args:
        dim: the dim along which `ordered` is sorted, in ascending order with NaN last; needed if
            it has several, of which the others pair up with those of `values`.
        side: "left": before elements equal to the value; "right": after them.

    Returns:
        The number of elements before each value; NaN belongs to the NaNs at the end.

    Raises:
        ValueError: an unknown side; no `dim` for a tensor with several or none; values that have
            the dim as well; or dtypes that differ.

    Examples:
        >>> edges = md.named([1.0, 2.0, 3.0], ["edge"])
        >>> x = md.named([0.5, 2.0, 9.0], ["length"])
        >>> print(md.searchsorted(edges, x), md.searchsorted(edges, x, side="right"))
        s32[length=3] [0 1 3] s32[length=3] [0 2 3]
    """
    if side not in ("left", "right"):
        raise ValueError(f"side must be 'left' or 'right', not {side!r}")
    if dim is None and len(ordered.shape) != 1:
        raise ValueError(f"give the dim along which {ordered.shape} is sorted")
    along = ordered.shape[0] if dim is None else ordered.shape.get(dim)
    if values.shape.find(along.name) is not None:
        raise ValueError(f"the values have dim `{along.name}` as well; rename it in one")
    before = outer(less if side == "left" else less_equal, ordered, values)
    if is_float(ordered.dtype):
        number, missing = ordered == ordered, values != values
        before = before | (outer(logical_and, missing, number) if side == "left" else missing)
    return sum(cast(before, "int32"), along.name)


@operation
def histogram(
    x: Tensor,
    edges: Sequence[float] | Tensor,
    into: DimLike = "bin",
    over: DimsLike | None = None,
) -> Tensor:
    """Returns how many elements lie between one edge and the next: `md.histogram(x, [0, 1, 2])`.

    Args:
        edges: ascending; numbers, or a tensor of x's dtype with one dim. As in numpy, a bin holds
            its lower edge, and the last bin both. What lies outside, or is NaN, is not counted.
        into: the dim of the bins, one fewer than the edges.
        over: the dims to count along, by default all; the others are kept.

    Returns:
        s32 counts, with `into` where the first of the dims counted along stood.

    Raises:
        ValueError: fewer than two edges; edges with several dims, of another dtype than x, that
            the dtype of x would round, or numbers that fall; or an `into` of another size than the
            bins. Whether the edges of a tensor rise is not known before it runs.

    Examples:
        >>> x = md.named([0.1, 0.2, 0.7, 1.0, 9.0], ["length"])
        >>> print(md.histogram(x, [0.0, 0.5, 1.0]))
        s32[bin=2] [2 2]
    """
    if not isinstance(edges, Tensor):
        exact = np.asarray(edges)
        with np.errstate(invalid="ignore"):
            numbers = exact.astype(x.dtype)
        if numbers.ndim != 1:
            raise ValueError("edges must be a list of numbers, or a tensor with one dim")
        if (exact[1:] < exact[:-1]).any():
            raise ValueError(f"the edges {list(edges)} fall somewhere; sort them")
        if not is_float(x.dtype) and (numbers != exact).any():
            raise ValueError(
                f"the edges {list(edges)} would be rounded to {short(x.dtype)}; "
                "cast x first, as in md.cast(x, 'float32')"
            )
        edges = literal(named(numbers, [Dimension(unused("edges", x.shape), len(numbers))]))
    if len(edges.shape) != 1 or edges.shape.volume < 2:
        raise ValueError(f"edges need one dim, of size 2 or more, not {edges.shape}")
    if edges.dtype != x.dtype:
        raise ValueError(f"edges are {short(edges.dtype)}, but x is {short(x.dtype)}; cast one")
    name, count = edges.shape[0].name, edges.shape[0].size - 1
    bins = Dimension(into if isinstance(into, str) else into.name, count)
    if isinstance(into, Dimension) and into != bins:
        raise ValueError(f"{count + 1} edges make {count} bins, not {into}")
    if x.shape.find(name) is not None:
        spare = unused(name, x.shape)
        edges, name = edges.rename({name: spare}), spare
    place = searchsorted(edges, x, name, "right") - 1
    last = sum(where(arange(edges.shape[0]) == count, edges, 0), name)
    place = where(x == last, count - 1, place)
    return bincount(where(x <= last, place, -1), bins, over)


@operation
def nonzero(mask: Tensor, dim: DimLike, into: Dimension, fill: int = -1) -> Tensor:
    """Returns where a mask holds along a dim, in order: `md.nonzero(mask, "length", found)`.

    Args:
        into: replaces `dim`; its size is the number of positions to return. Further ones are left
            out.
        fill: the value where there are fewer; the default, -1, is outside of every dim, so `take`
            gives zeros for it and `scatter` drops it.

    Returns:
        s32 indices along `dim`.

    Raises:
        ValueError: the mask lacks the dim or is not bool, or `into` has no size.

    Examples:
        >>> mask = md.named([False, True, False, True], ["length"])
        >>> print(md.nonzero(mask, "length", md.Dimension("found", 3)))
        s32[found=3] [ 1  3 -1]
    """
    need_bool(mask)
    along, (into,) = mask.shape.get(dim), sized(into)
    rank = cumsum(cast(mask, "int32"), along, exclusive=True)
    rank = where(mask, rank, -1)
    shape = Shape(into if d == along else d for d in mask.shape)
    places = broadcast(arange(along), mask.shape) - fill
    positions = bind_one(SCATTER_ADD, (places, rank), {"dim": into.name, "shape": shape})
    return positions + fill
