"""Gather by index (take) and scatter."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from meshdsl.lowering.backends.common.arrange import permutation
from meshdsl.lowering.backends.jax.machine import Arrays, Emitter, Machine
from meshdsl.lowering.parameters import Indexed, RowSums, parameters_of
from meshdsl.lowering.program import Instruction
from meshdsl.tensors.dtypes import identity, is_float


def _take(machine: Machine, instruction: Instruction, inputs: Arrays) -> Any:
    """Returns the positions of a table at indices; zeros for indices outside of it."""
    table, indices = (v.local for v in instruction.inputs)
    (out,), params = instruction.outputs, parameters_of(instruction, Indexed)
    dim, shared = params["dim"], params["pairs"]
    rows, index_dims = table.without(shared), indices.without(shared)
    at, size = rows.position(dim), rows.get(dim).size

    def gather(rows: Any, index: Any) -> Any:
        # JAX would count negative indices from the end.
        positions = jnp.where(index < 0, size, index)
        return jnp.take(rows, positions, axis=at, mode="fill", fill_value=0)

    for _ in shared:
        gather = jax.vmap(gather)
    result = gather(
        jnp.transpose(inputs[0], permutation(table.names, [*shared, *rows.names])),
        jnp.transpose(inputs[1], permutation(indices.names, [*shared, *index_dims.names])),
    )
    names = [*shared, *rows.names[:at], *index_dims.names, *rows.names[at + 1 :]]
    return jnp.transpose(result, permutation(names, out.local.names))


def _scatter(method: str, kind: str) -> Emitter:
    """Returns the emitter of a scatter; indices outside of the dim are dropped."""

    def emit(machine: Machine, instruction: Instruction, inputs: Arrays) -> Any:
        updates, indices = (v.local for v in instruction.inputs)
        (out,), params = instruction.outputs, parameters_of(instruction, Indexed)
        dim, shared = params["dim"], params["pairs"]
        index_dims, rest = indices.without(shared), out.local.without([dim, *shared])
        size = out.local.get(dim).size
        sum_dtype = _sum_dtype(out.dtype) if kind == "sum" else out.dtype
        blank = np.asarray(identity(kind, out.dtype)).astype(sum_dtype)

        def scatter(updates: Any, index: Any) -> Any:
            rows, updates = jnp.full((size, *rest.sizes), blank), updates.astype(sum_dtype)
            if index_dims.volume == 1:
                return _one_update(rows, index, updates, method, blank).astype(out.dtype)
            at = rows.at[jnp.where(index < 0, size, index)]
            return getattr(at, method)(updates, mode="drop").astype(out.dtype)

        for _ in shared:
            scatter = jax.vmap(scatter)
        result = scatter(
            jnp.transpose(
                inputs[0], permutation(updates.names, [*shared, *index_dims.names, *rest.names])
            ),
            jnp.transpose(inputs[1], permutation(indices.names, [*shared, *index_dims.names])),
        )
        return jnp.transpose(result, permutation([*shared, dim, *rest.names], out.local.names))

    return emit


def _one_update(rows: Any, index: Any, update: Any, method: str, nothing: np.ndarray) -> Any:
    """Combines one row with an update; with `nothing` where the index is outside.

    XLA makes a single update a `dynamic_update_slice`. Where that is added to a `dynamic_slice`, it
    computes the row before the update from the index as it is, and writes it at the index that the
    bounds allow (jaxlib 0.10.2, any platform). So the index is inside here.
    """
    index, update = index.reshape(()), update.reshape(rows.shape[1:])
    inside = (index >= 0) & (index < rows.shape[0])
    at = rows.at[jnp.where(inside, index, 0)]
    update = jnp.where(inside, update, nothing)
    return getattr(at, method)(update, mode="promise_in_bounds")


def _sum_dtype(dtype: np.dtype) -> np.dtype:
    """Returns the dtype of sums: half precision would round many small summands away."""
    half = is_float(dtype) and dtype.itemsize < 4
    return np.dtype("float32") if half else dtype


def _row_sums(machine: Machine, instruction: Instruction, inputs: Arrays) -> Any:
    """Returns the sums of each row's updates, and the rows, by sorting the indices."""
    updates, indices = (v.local for v in instruction.inputs)
    params, dtype = parameters_of(instruction, RowSums), instruction.outputs[0].dtype
    shared, size = params["pairs"], params["size"]
    index_dims = indices.without(shared)
    rest = updates.without(indices.names)
    count = index_dims.volume

    def add_up(updates: Any, index: Any) -> Any:
        index = index.reshape(count)
        number = jnp.arange(count, dtype=np.int32)
        rows = jnp.where((index < 0) | (index > size), size, index)
        rows, order = lax.sort((rows, number), num_keys=1, is_stable=True)
        begins = jnp.concatenate([jnp.ones(1, bool), rows[1:] != rows[:-1]])
        first = lax.cummax(jnp.where(begins, number, 0))
        moved = jnp.take(updates.reshape(count, *rest.sizes), order, axis=0, mode="clip")
        inside = (rows < size).reshape(count, *(1,) * len(rest))
        moved = jnp.where(inside, moved.astype(_sum_dtype(dtype)), 0)
        at = jnp.zeros_like(moved).at[first]
        sums = at.add(moved, mode="drop", indices_are_sorted=True).astype(dtype)
        return sums.reshape(updates.shape), rows.reshape(index_dims.sizes)

    for _ in shared:
        add_up = jax.vmap(add_up)
    names = [*shared, *index_dims.names]
    sums, rows = add_up(
        jnp.transpose(inputs[0], permutation(updates.names, [*names, *rest.names])),
        jnp.transpose(inputs[1], permutation(indices.names, names)),
    )
    return (
        jnp.transpose(sums, permutation([*names, *rest.names], updates.names)),
        jnp.transpose(rows, permutation(names, indices.names)),
    )


def _add_rows(machine: Machine, instruction: Instruction, inputs: Arrays) -> Any:
    """Returns a table with the sums of `row_sums` added to its rows."""
    table, sums, rows = (v.local for v in instruction.inputs)
    (out,), params = instruction.outputs, parameters_of(instruction, Indexed)
    dim, shared = params["dim"], params["pairs"]
    index_dims, rest = rows.without(shared), table.without([dim, *shared])

    def add(table: Any, sums: Any, rows: Any) -> Any:
        if index_dims.volume == 1:  # a sum with -0.0 is the other number, to the bit
            return _one_update(table, rows, sums, "add", np.asarray(-0.0, table.dtype))
        return table.at[rows].add(sums, mode="drop", indices_are_sorted=True)

    for _ in shared:
        add = jax.vmap(add)
    names = [*shared, *index_dims.names]
    result = add(
        jnp.transpose(inputs[0], permutation(table.names, [*shared, dim, *rest.names])),
        jnp.transpose(inputs[1], permutation(sums.names, [*names, *rest.names])),
        jnp.transpose(inputs[2], permutation(rows.names, names)),
    )
    return jnp.transpose(result, permutation([*shared, dim, *rest.names], out.local.names))


EMITTERS: Mapping[str, Emitter] = {
    "take": _take,
    "row_sums": _row_sums,
    "add_rows": _add_rows,
    "scatter_add": _scatter("add", "sum"),
    "scatter_max": _scatter("max", "max"),
    "scatter_min": _scatter("min", "min"),
}
