"""Partition rules of sorting.

A sort needs its dim unsplit: the dim is gathered, or its axes go to another dim.
The largest elements of a split dim are among the largest of each shard. Only these candidates are
sent, and each device merges those of its share of the other dims. Where they are whole shards, only
the elements are sent: their order tells their positions.
"""

from __future__ import annotations

from collections.abc import Sequence

from meshdsl.layouts.tensor_layout import TensorLayout
from meshdsl.lowering.communication.totals import combine_along
from meshdsl.lowering.parameters import Sort
from meshdsl.lowering.partition.strategy import (
    Case,
    Strategies,
    Strategy,
    Work,
    bytes_moved,
    offer,
    whole_along,
)
from meshdsl.lowering.program import Value
from meshdsl.lowering.writing.builder import INT32, BlockBuilder
from meshdsl.tensors.dims import Dimension, Shape
from meshdsl.tensors.dtypes import identity

_CANDIDATES = "candidates_"


def sort(case: Case) -> Strategy | Strategies:
    """Local, in a layout that does not split the dim."""
    op, (start,) = case.operation, case.operands
    (x,), (_, indices), dim = op.inputs, op.outputs, op.params["dim"]
    layouts = whole_along(x.shape, start, dim, case.mesh) or [start]

    def work(layout: TensorLayout) -> Work:
        # One result at least is read, and moved back.
        moves = (x, start, layout), (indices, layout, case.results[1])
        return Work(bytes_moved(moves, case.mesh))

    def strategy(layout: TensorLayout) -> Strategy:
        def emit(builder: BlockBuilder, inputs: Sequence[Value]) -> Sequence[Value]:
            results = [(t.shape, t.dtype, layout) for t in op.outputs]
            return builder.add("sort", inputs, results, op.params)

        return Strategy((layout,), (layout, layout), emit)

    return offer(layouts, work, strategy)


def top_k(case: Case) -> Strategy:
    """Local where the dim is unsplit; else the candidates of all shards are merged."""
    op, (layout,) = case.operation, case.operands
    (x,), (out, _), dim = op.inputs, op.outputs, op.params["dim"]
    axes = tuple(axis for axis in layout.axes(dim) if case.mesh.sizes[axis] > 1)
    result = layout.restrict(x.shape.without([dim]).names)

    def emit(builder: BlockBuilder, inputs: Sequence[Value]) -> Sequence[Value]:
        value, into = inputs[0], op.params["into"]
        if not axes:
            return _largest(builder, value, dim, into, out.shape, result)
        back = into.size * (x.dtype.itemsize + INT32.itemsize)
        count = min(into.size, value.local.get(dim).size)
        if count == value.local.get(dim).size:

            def of_all(rows: Sequence[Value]) -> Sequence[Value]:
                (row,) = rows
                shape = Shape([into, *row.shape.without([dim])])
                return _largest(builder, row, dim, into, shape, row.layout)

            # The value lies along axes of one device too.
            split = layout.axes(dim)
            best = combine_along(builder, [_led(builder, value, [dim])], split, of_all, back)
            return [_led(builder, each, out.shape.names) for each in best]
        value = builder.mask_pads(value, [dim], identity("max", x.dtype))
        many = Dimension(_CANDIDATES, count * case.mesh.extent(axes))
        shape = Shape(many if d.name == dim else d for d in x.shape)
        apart = result.split(_CANDIDATES, axes)
        largest, places = _largest(builder, value, dim, many, shape, apart)
        whole = builder.positions(x.shape.get(dim), axes)
        places = _look_up(builder, whole, places, dim, ())
        padded = builder.has_pads(x.shape.get(dim), axes)

        def merge(rows: Sequence[Value]) -> Sequence[Value]:
            return _merged(builder, rows, into, padded)

        rows = [_led(builder, each, [_CANDIDATES]) for each in (largest, places)]
        best = combine_along(builder, rows, axes, merge, back)
        return [_led(builder, each, out.shape.names) for each in best]

    return Strategy((layout,), (result, result), emit)


def _largest(
    builder: BlockBuilder,
    value: Value,
    dim: str,
    into: Dimension,
    shape: Shape,
    layout: TensorLayout,
) -> tuple[Value, Value]:
    results = [(shape, value.dtype, layout), (shape, INT32, layout)]
    largest, places = builder.add("top_k", (value,), results, {"dim": dim, "into": into.name})
    return largest, places


def _merged(
    builder: BlockBuilder, rows: Sequence[Value], into: Dimension, padded: bool
) -> Sequence[Value]:
    """Returns the largest of all candidates, and their positions.

    Args:
        rows: the candidates, and their positions: [candidates_, ...] both.
    """
    (candidates, places), shape, layout = rows, rows[0].shape, rows[0].layout
    pairs = shape.without([_CANDIDATES]).names
    if padded:  # pads to the end, so that they lose each tie
        params: Sort = {"dim": _CANDIDATES, "descending": False}
        results = [(shape, INT32, layout)] * 2
        places, order = builder.add("sort", (places,), results, params)
        candidates = _look_up(builder, candidates, order, _CANDIDATES, pairs)
    left = Shape([into, *shape.without([_CANDIDATES])])
    best, which = _largest(builder, candidates, _CANDIDATES, into, left, layout)
    return best, _look_up(builder, places, which, _CANDIDATES, pairs)


def _led(builder: BlockBuilder, value: Value, names: Sequence[str]) -> Value:
    """Returns a value transposed so that its dims begin with `names`."""
    shape = Shape([*value.shape.select(names), *value.shape.without(names)])
    if shape.names == value.shape.names:
        return value
    return builder.one("transpose", (value,), shape, value.dtype, value.layout)


def _look_up(
    builder: BlockBuilder, table: Value, indices: Value, dim: str, pairs: tuple[str, ...]
) -> Value:
    """Returns the table's elements at indices that have all of its other dims."""
    shape, layout = indices.shape, indices.layout
    return builder.one("take", (table, indices), shape, table.dtype, layout, dim=dim, pairs=pairs)


RULES = {"sort": sort, "top_k": top_k}
