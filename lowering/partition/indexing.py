"""Partition rules of look-ups.

A table stays where it is. Where its looked-up dim is split, each device shifts the indices to its
own rows and the local look-up gives zeros for all others: the results are summands of the whole.
Backwards, each device adds up the rows it holds and drops the rest.
"""

from __future__ import annotations

from collections.abc import Sequence

from meshdsl.layouts.tensor_layout import TensorLayout
from meshdsl.lowering.builder import INT32, BlockBuilder
from meshdsl.lowering.partition.plan import Case, Plan
from meshdsl.lowering.program import Value


def take(case: Case) -> Plan:
    """Local look-up; summands where the looked-up dim is split."""
    op = case.operation
    table, (out,) = op.inputs[0], op.outputs
    dim = table.shape.get(op.params["dim"])
    held = case.operands[0]
    rows = held.axes(dim.name)
    index = case.operands[1].drop(held.split_axes)
    splits = dict(index.splits) | {d: a for d, a in held.splits if d != dim.name}
    result = TensorLayout.of(splits).add_partial(rows)

    def emit(builder: BlockBuilder, inputs: Sequence[Value]) -> Sequence[Value]:
        own = _own_indices(builder, inputs[1], case, rows)
        here = result.add_partial(inputs[0].layout.partial_axes)
        return builder.add(
            "take", (inputs[0], own), [(out.shape, out.dtype, here)], {"dim": dim.name}
        )

    used = held.split_axes | index.split_axes
    return Plan((held, index), (result,), emit, linear=(0,), fixed=used)


def scatter_add(case: Case) -> Plan:
    """Local adding-up; summands over the axes that split the indices."""
    op = case.operation
    (out,) = op.outputs
    dim = op.params["dim"]
    table = case.results[0]
    rows = table.axes(dim)
    index = case.operands[1].drop(table.split_axes)
    kept = {d: a for d, a in table.splits if d != dim}
    update = TensorLayout.of(dict(index.splits) | kept)
    summed = [axis for _, axes in index.splits for axis in axes]
    result = table.add_partial(summed)

    def emit(builder: BlockBuilder, inputs: Sequence[Value]) -> Sequence[Value]:
        own = _own_indices(builder, inputs[1], case, rows)
        here = result.add_partial(inputs[0].layout.partial_axes)
        return builder.add(
            "scatter_add", (inputs[0], own), [(out.shape, out.dtype, here)], {"dim": dim}
        )

    used = table.split_axes | index.split_axes
    return Plan((update, index), (result,), emit, linear=(0,), fixed=used)


def _own_indices(builder: BlockBuilder, indices: Value, case: Case, rows: tuple[str, ...]) -> Value:
    """Returns the indices counted from the first row that this device holds."""
    if indices.dtype != INT32:
        indices = builder.one("cast", (indices,), indices.shape, INT32, indices.layout)
    if not rows:
        return indices
    op = case.operation
    shape = op.inputs[0].shape if op.name == "take" else op.outputs[0].shape
    return builder.local_indices(indices, shape.get(op.params["dim"]), rows)


RULES = {"take": take, "scatter_add": scatter_add}
