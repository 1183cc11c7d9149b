"""Partition rules of look-ups.

The table is not moved. If its looked-up dim is split, each device shifts the indices to its own
rows, and its look-up gives zeros for all others: the results are partial sums. A scatter into a
split dim is local too: each device keeps the updates of its own rows and drops the rest. Split
updates leave partial results. Dims that table and indices share are split alike.

Another strategy moves the table instead of the indices and results. It is offered for a scatter,
for an axis that splits both table and indices (a table stored over the batch's axis), and for a
look-up along a dim at as many positions as the dim has.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from meshdsl.layouts.tensor_layout import TensorLayout
from meshdsl.lowering.parameters import Indexed
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
from meshdsl.lowering.writing.builder import BOOL, INT32, BlockBuilder
from meshdsl.ops.indexing import paired
from meshdsl.tensors.dims import Shape


class _Layouts(NamedTuple):
    """Matching layouts: of the table, of the indices, and of a tensor of one element per index."""

    table: TensorLayout
    indices: TensorLayout
    elements: TensorLayout


def _layouts(
    table: TensorLayout, indices: TensorLayout, pairs: Sequence[str], dim: str
) -> _Layouts:
    """Returns the layouts that leave the table in place; indices drop the axes that it uses."""
    free = indices.drop(table.split_axes)
    shared = {name: table.axes(name) or free.axes(name) for name in pairs}
    table = TensorLayout.of(dict(table.splits) | shared)
    indices = TensorLayout.of(dict(free.splits) | shared)
    others = {d: axes for d, axes in table.splits if d != dim}
    return _Layouts(table, indices, TensorLayout.of(dict(indices.splits) | others))


def take(case: Case) -> Strategy | Strategies:
    """Local look-up; a partial sum where the looked-up dim is split."""
    op = case.operation
    (table, index), (out,), dim = op.inputs, op.outputs, op.params["dim"]
    pairs = paired(table.shape, index.shape, dim)
    of_table, of_index = case.operands
    tables = list(dict.fromkeys([of_table, of_table.drop(of_index.split_axes)]))
    if index.shape.find(dim) is not None:
        tables += whole_along(table.shape, of_table, dim, case.mesh)
    every = [_layouts(where, of_index, pairs, dim) for where in tables]

    def work(layouts: _Layouts) -> Work:
        left = layouts.elements.add_partial(layouts.table.axes(dim))
        before = (table, of_table, layouts.table), (index, of_index, layouts.indices)
        return Work(bytes_moved((*before, (out, left, case.results[0])), case.mesh))

    def strategy(layouts: _Layouts) -> Strategy:
        rows = layouts.table.axes(dim)
        result = layouts.elements.add_partial(rows)

        def emit(builder: BlockBuilder, inputs: Sequence[Value]) -> Sequence[Value]:
            own = _own_indices(builder, inputs[1], table.shape, dim, rows)
            here = result.add_partial(inputs[0].layout.partial_axes)
            params: Indexed = {"dim": dim, "pairs": pairs}
            return builder.add("take", (inputs[0], own), [(out.shape, out.dtype, here)], params)

        used = layouts.elements.split_axes | layouts.table.split_axes
        return Strategy(
            (layouts.table, layouts.indices), (result,), emit, linear=op.linear, fixed=used
        )

    return offer(every, work, strategy)


def scatter(case: Case) -> Strategy | Strategies:
    """Local; partial over the axes that split places of the indices."""
    op = case.operation
    (update, index), (out,), dim = op.inputs, op.outputs, op.params["dim"]
    kind = op.primitive.combines
    assert kind is not None
    pairs = paired(out.shape, index.shape, dim)
    (home,), (of_update, of_index) = case.results, case.operands

    def places(layouts: _Layouts) -> list[str]:
        return [axis for d, axes in layouts.indices.splits if d not in pairs for axis in axes]

    tables = [home, home.drop(of_index.split_axes)]
    tables += whole_along(out.shape, home, dim, case.mesh)
    led = of_update.restrict(index.shape.names)  # indices that are split as the updates are
    starts = [of_index, led] if led.splits and not of_index.splits else [of_index]
    ways = dict.fromkeys((where, start) for start in starts for where in tables)
    every = [_layouts(where, start, pairs, dim) for where, start in ways]

    def work(layouts: _Layouts) -> Work:
        left = layouts.table.add_partial(places(layouts), kind)
        before = (update, of_update, layouts.elements), (index, of_index, layouts.indices)
        return Work(bytes_moved((*before, (out, left, home)), case.mesh))

    def strategy(layouts: _Layouts) -> Strategy:
        result = layouts.table.add_partial(places(layouts), kind)

        def emit(builder: BlockBuilder, inputs: Sequence[Value]) -> Sequence[Value]:
            own = _own_indices(builder, inputs[1], out.shape, dim, layouts.table.axes(dim), pairs)
            here = result.add_partial(inputs[0].layout.partial_axes)
            params: Indexed = {"dim": dim, "pairs": pairs}
            return builder.add(op.name, (inputs[0], own), [(out.shape, out.dtype, here)], params)

        used = layouts.elements.split_axes | layouts.table.split_axes
        operands = layouts.elements, layouts.indices
        return Strategy(operands, (result,), emit, linear=op.linear, fixed=used)

    return offer(every, work, strategy)


def update(case: Case) -> Strategy:
    """Local: writes the piece into x, or selects it position by position along a split dim.

    Along a split dim every device has the piece, and compares its positions with its own. Positions
    that are given one by one are counted from the device's own first one instead.
    """
    op, (layout,) = case.operation, case.results
    (x, piece, begin), dim = op.inputs, op.params["dim"]
    rows, part = layout.axes(dim), piece.shape.get(op.params["part"])

    def emit(builder: BlockBuilder, inputs: Sequence[Value]) -> Sequence[Value]:
        partial = {p for value in inputs for p in value.layout.partial}
        here = layout.add_partial([axis for axis, _ in partial])
        result = (x.shape, x.dtype, here)
        if not rows:
            return builder.add("update", inputs, [result], op.params)
        target, pieces, start = inputs
        if begin.shape:
            places = builder.local_indices(start, x.shape.get(dim), rows)
            return builder.add("update", (target, pieces, places), [result], op.params)
        along, own = Shape([x.shape.get(dim)]), TensorLayout.of({dim: rows})
        places = builder.positions(along[0], rows)
        index = builder.one("subtract", (places, start), along, INT32, own)
        zero, size = builder.number(0, INT32), builder.number(part.size, INT32)
        least = builder.one("greater_equal", (index, zero), along, BOOL, own)
        most = builder.one("less", (index, size), along, BOOL, own)
        inside = builder.one("logical_and", (least, most), along, BOOL, own)
        rows_of_piece = (Shape([*along, *piece.shape.without([part.name])]), x.dtype, here)
        params: Indexed = {"dim": part.name, "pairs": ()}
        (chosen,) = builder.add("take", (pieces, index), [rows_of_piece], params)
        return builder.add("select", (inside, chosen, target), [result])

    free = layout.split(dim, ())
    return Strategy(
        (layout, free, TensorLayout()),
        (layout,),
        emit,
        linear=op.linear,
        additive=op.primitive.additive,
        fixed=frozenset(rows),
    )


def _own_indices(
    builder: BlockBuilder,
    indices: Value,
    table: Shape,
    dim: str,
    rows: tuple[str, ...],
    pairs: Sequence[str] | None = None,
) -> Value:
    """Returns the indices counted from the first row that this device holds.

    `pairs` are the dims that pair up, for a scatter: pads of all other dims then point nowhere.
    """
    if indices.dtype != INT32:
        indices = builder.one("cast", (indices,), indices.shape, INT32, indices.layout)
    if pairs is not None:
        indices = builder.mask_pads(indices, indices.shape.without(pairs).names, -1)
    return builder.local_indices(indices, table.get(dim), rows)


RULES = {
    "take": take,
    "update": update,
    "scatter_add": scatter,
    "scatter_max": scatter,
    "scatter_min": scatter,
}
