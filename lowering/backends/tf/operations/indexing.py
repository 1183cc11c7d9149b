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
from meshdsl.lowering.parameters import Indexed, parameters_of
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


EMITTERS: Mapping[str, Emitter] = {
    "take": _take,
    "scatter_add": _scatter(tf.tensor_scatter_nd_add, "sum"),
    "scatter_max": _scatter(tf.tensor_scatter_nd_max, "max"),
    "scatter_min": _scatter(tf.tensor_scatter_nd_min, "min"),
}
