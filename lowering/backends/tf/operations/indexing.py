"""Gather by index (take) and scatter."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf

from meshdsl.lowering.backends.common.arrange import permutation, permuted
from meshdsl.lowering.backends.tf import namespace as xp
from meshdsl.lowering.backends.tf.machine import Arrays, Emitter, Machine
from meshdsl.lowering.backends.tf.operations.elementwise import widened
from meshdsl.lowering.parameters import Indexed, RowSums, parameters_of
from meshdsl.lowering.program import Instruction
from meshdsl.tensors.dtypes import identity


def _take(machine: Machine, instruction: Instruction, inputs: Arrays) -> tf.Tensor:
    """Returns the positions of a table at indices; zeros for indices outside of it."""
    table, indices = (v.local for v in instruction.inputs)
    (out,), params = instruction.outputs, parameters_of(instruction, Indexed)
    dim, shared = params["dim"], params["pairs"]
    index_dims, rest = indices.without(shared), table.without([dim, *shared])
    rows = permuted(xp, inputs[0], permutation(table.names, [*shared, dim, *rest.names]))
    index = permuted(xp, inputs[1], permutation(indices.names, [*shared, *index_dims.names]))
    size = table.get(dim).size
    inside = (index >= 0) & (index < size)
    result = tf.gather(rows, tf.where(inside, index, 0), axis=len(shared), batch_dims=len(shared))
    mask = tf.reshape(inside, [*inside.shape, *(1,) * len(rest)])
    result = tf.where(mask, result, tf.zeros([], result.dtype))
    names = [*shared, *index_dims.names, *rest.names]
    return permuted(xp, result, permutation(names, out.local.names))


def _scatter(combine: Callable[..., Any], kind: str) -> Emitter:
    """Returns the emitter of a scatter; the shared dims are merged with the scattered one."""

    def emit(machine: Machine, instruction: Instruction, inputs: Arrays) -> tf.Tensor:
        updates, indices = (v.local for v in instruction.inputs)
        (out,), params = instruction.outputs, parameters_of(instruction, Indexed)
        dim, shared = params["dim"], params["pairs"]
        index_dims, rest = indices.without(shared), out.local.without([dim, *shared])
        size = out.local.get(dim).size
        count = math.prod(out.local.get(name).size for name in shared)
        update = permuted(
            xp, inputs[0], permutation(updates.names, [*shared, *index_dims.names, *rest.names])
        )
        index = permuted(xp, inputs[1], permutation(indices.names, [*shared, *index_dims.names]))
        index = tf.reshape(index, [count, index_dims.volume])
        first = tf.range(count, dtype=tf.int32)[:, None] * size
        # Indices outside of the dim write to an additional row at the end, which is dropped.
        row = tf.where((index >= 0) & (index < size), index + first, count * size)
        update = widened(tf.reshape(update, [count * index_dims.volume, rest.volume]))
        blank = tf.constant(identity(kind, out.dtype), update.dtype)
        rows = tf.broadcast_to(blank, [count * size + 1, rest.volume])
        rows = combine(rows, tf.reshape(row, [-1, 1]), update)[:-1]
        sizes = [*(out.local.get(name).size for name in shared), size, *rest.sizes]
        result = tf.cast(tf.reshape(rows, sizes), out.dtype)
        return permuted(xp, result, permutation([*shared, dim, *rest.names], out.local.names))

    return emit


def _row_sums(machine: Machine, instruction: Instruction, inputs: Arrays) -> list[tf.Tensor]:
    """Returns the sums of each row's updates, and the rows, by sorting the indices."""
    updates, indices = (v.local for v in instruction.inputs)
    params, out = parameters_of(instruction, RowSums), instruction.outputs[0]
    shared, size = params["pairs"], params["size"]
    names, rest = [*shared, *indices.without(shared).names], updates.without(indices.names)
    tables, count = indices.select(shared).volume, indices.without(shared).volume
    index = tf.reshape(permuted(xp, inputs[1], permutation(indices.names, names)), [tables, count])
    update = permuted(xp, inputs[0], permutation(updates.names, [*names, *rest.names]))
    update = widened(tf.reshape(update, [tables, count, rest.volume]))
    rows = tf.where((index >= 0) & (index < size), index, size)
    order = tf.argsort(rows, axis=-1, stable=True)
    rows = tf.gather(rows, order, axis=1, batch_dims=1)
    moved = tf.gather(update, order, axis=1, batch_dims=1)
    moved = tf.where((rows < size)[:, :, None], moved, tf.zeros([], moved.dtype))
    changes = tf.cast(rows[:, 1:] != rows[:, :-1], tf.int32)
    number = tf.concat([tf.zeros([tables, 1], tf.int32), tf.cumsum(changes, axis=1)], 1)
    # The sum of each row is at its number; the numbers that are left have the table's size.
    at = tf.reshape(number + tf.range(tables, dtype=tf.int32)[:, None] * count, [-1, 1])
    sums = tf.zeros([tables * count, rest.volume], moved.dtype)
    sums = tf.tensor_scatter_nd_add(sums, at, tf.reshape(moved, [-1, rest.volume]))
    found = tf.tensor_scatter_nd_min(tf.fill([tables * count], size), at, tf.reshape(rows, [-1]))
    sizes = [*(indices.get(name).size for name in names)]
    sums = tf.cast(tf.reshape(sums, [*sizes, *rest.sizes]), out.dtype)
    return [
        permuted(xp, sums, permutation([*names, *rest.names], updates.names)),
        permuted(xp, tf.reshape(found, sizes), permutation(names, indices.names)),
    ]


def _add_rows(machine: Machine, instruction: Instruction, inputs: Arrays) -> tf.Tensor:
    """Returns a table with the sums of `row_sums` added to its rows."""
    table, sums, places = (v.local for v in instruction.inputs)
    params = parameters_of(instruction, Indexed)
    dim, shared = params["dim"], params["pairs"]
    names, rest = [*shared, *places.without(shared).names], table.without([dim, *shared])
    tables, size = table.select(shared).volume, table.get(dim).size
    rows = permuted(xp, inputs[0], permutation(table.names, [*shared, dim, *rest.names]))
    shape = rows.shape
    moved = permuted(xp, inputs[1], permutation(sums.names, [*names, *rest.names]))
    moved = tf.reshape(moved, [-1, rest.volume])
    index = permuted(xp, inputs[2], permutation(places.names, names))
    index = tf.reshape(index, [tables, places.without(shared).volume])
    inside = index < size
    at = tf.where(inside, index + tf.range(tables, dtype=tf.int32)[:, None] * size, 0)
    moved = tf.where(tf.reshape(inside, [-1, 1]), moved, tf.zeros([], moved.dtype))
    rows = tf.reshape(rows, [tables * size, rest.volume])
    rows = tf.tensor_scatter_nd_add(rows, tf.reshape(at, [-1, 1]), moved)
    order = permutation([*shared, dim, *rest.names], table.names)
    return permuted(xp, tf.reshape(rows, shape), order)


EMITTERS: Mapping[str, Emitter] = {
    "take": _take,
    "row_sums": _row_sums,
    "add_rows": _add_rows,
    "scatter_add": _scatter(tf.tensor_scatter_nd_add, "sum"),
    "scatter_max": _scatter(tf.tensor_scatter_nd_max, "max"),
    "scatter_min": _scatter(tf.tensor_scatter_nd_min, "min"),
}
