"""Partition rules of look-ups.

A table stays where it is. Where its looked-up dim is split, each device shifts the indices to its
own rows and the local look-up gives zeros for all others: the results are summands of the whole.
A scatter into a split dim is local too: each device keeps the updates of the rows it holds and
drops the rest; split updates leave partial results. Dims that table and indices share are split
alike. Where an axis splits both the table and the indices (a table stored over the batch's axis),
or where looking along a dim at as many places as it has, or scattering, another strategy moves the
table instead of the indices and results.
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


class _Ends(NamedTuple):
    """Layouts that fit each other: of the table, the indices, and one element per index."""

    table: TensorLayout
    indices: TensorLayout
    elements: TensorLayout


def _ends(table: TensorLayout, indices: TensorLayout, pairs: Sequence[str], dim: str) -> _Ends:
    """Leaves the table where it is; the indices keep what does not clash with that."""
    free = indices.drop(table.split_axes)
    shared = {name: table.axes(name) or free.axes(name) for name in pairs}
    table = TensorLayout.of(dict(table.splits) | shared)
    indices = TensorLayout.of(dict(free.splits) | shared)
    others = {d: axes for d, axes in table.splits if d != dim}
    return _Ends(table, indices, TensorLayout.of(dict(indices.splits) | others))


def take(case: Case) -> Strategy | Strategies:
    """Local look-up; summands where the looked-up dim is split."""
    op = case.operation
    (table, index), (out,), dim = op.inputs, op.outputs, op.params["dim"]
    pairs = paired(table.shape, index.shape, dim)
    held, around = case.operands
    tables = list(dict.fromkeys([held, held.drop(around.split_axes)]))
    if index.shape.find(dim) is not None:
        tables += whole_along(table.shape, held, dim, case.mesh)
    every = [_ends(where, around, pairs, dim) for where in tables]

    def work(ends: _Ends) -> Work:
        left = ends.elements.add_partial(ends.table.axes(dim))
        before = (table, held, ends.table), (index, around, ends.indices)
        return Work(bytes_moved((*before, (out, left, case.results[0])), case.mesh))

    def strategy(ends: _Ends) -> Strategy:
        rows = ends.table.axes(dim)
        result = ends.elements.add_partial(rows)

        def emit(builder: BlockBuilder, inputs: Sequence[Value]) -> Sequence[Value]:
            own = _own_indices(builder, inputs[1], table.shape, dim, rows)
            here = result.add_partial(inputs[0].layout.partial_axes)
            params: Indexed = {"dim": dim, "pairs": pairs}
            return builder.add("take", (inputs[0], own), [(out.shape, out.dtype, here)], params)

        used = ends.elements.split_axes | ends.table.split_axes
        return Strategy((ends.table, ends.indices), (result,), emit, linear=op.linear, fixed=used)

    return offer(every, work, strategy)


def scatter(case: Case) -> Strategy | Strategies:
    """Local; partial over the axes that split places of the indices."""
    op = case.operation
    (update, index), (out,), dim = op.inputs, op.outputs, op.params["dim"]
    kind = op.primitive.combines
    assert kind is not None
    pairs = paired(out.shape, index.shape, dim)
    (home,), (given, around) = case.results, case.operands

    def places(ends: _Ends) -> list[str]:
        return [axis for d, axes in ends.indices.splits if d not in pairs for axis in axes]

    tables = [home, home.drop(around.split_axes)]
    tables += whole_along(out.shape, home, dim, case.mesh)
    every = [_ends(where, around, pairs, dim) for where in dict.fromkeys(tables)]

    def work(ends: _Ends) -> Work:
        left = ends.table.add_partial(places(ends), kind)
        before = (update, given, ends.elements), (index, around, ends.indices)
        return Work(bytes_moved((*before, (out, left, home)), case.mesh))

    def strategy(ends: _Ends) -> Strategy:
        result = ends.table.add_partial(places(ends), kind)

        def emit(builder: BlockBuilder, inputs: Sequence[Value]) -> Sequence[Value]:
            own = _own_indices(builder, inputs[1], out.shape, dim, ends.table.axes(dim), pairs)
            here = result.add_partial(inputs[0].layout.partial_axes)
            params: Indexed = {"dim": dim, "pairs": pairs}
            return builder.add(op.name, (inputs[0], own), [(out.shape, out.dtype, here)], params)

        used = ends.elements.split_axes | ends.table.split_axes
        operands = ends.elements, ends.indices
        return Strategy(operands, (result,), emit, linear=op.linear, fixed=used)

    return offer(every, work, strategy)


def update(case: Case) -> Strategy:
    """Local: the positions are written where x is, or, along a split dim, chosen one by one.

    Every device of a split dim compares its own positions with those of the piece, which all have.
    """
    op, (layout,) = case.operation, case.results
    (x, piece, _), dim = op.inputs, op.params["dim"]
    rows, part = layout.axes(dim), piece.shape.get(op.params["part"])

    def emit(builder: BlockBuilder, inputs: Sequence[Value]) -> Sequence[Value]:
        partial = {p for value in inputs for p in value.layout.partial}
        here = layout.add_partial([axis for axis, _ in partial])
        result = (x.shape, x.dtype, here)
        if not rows:
            return builder.add("update", inputs, [result], op.params)
        target, pieces, start = inputs
        along, own = Shape([x.shape.get(dim)]), TensorLayout.of({dim: rows})
        places = builder.positions(along[0], rows)
        index = builder.one("subtract", (places, start), along, INT32, own)
        zero, size = builder.number(0, INT32), builder.number(part.size, INT32)
        least = builder.one("greater_equal", (index, zero), along, BOOL, own)
        most = builder.one("less", (index, size), along, BOOL, own)
        inside = builder.one("logical_and", (least, most), along, BOOL, own)
        found = (Shape([*along, *piece.shape.without([part.name])]), x.dtype, here)
        params: Indexed = {"dim": part.name, "pairs": ()}
        (chosen,) = builder.add("take", (pieces, index), [found], params)
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

    Given the dims that pair up, as for a scatter, pads of the others are made to point nowhere.
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
