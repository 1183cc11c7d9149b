"""Gather by index (take), scatter, and update of a slice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from meshdsl.lowering.backends.common.arrange import permutation
from meshdsl.lowering.backends.numpy.machine import Arrays, Emitter, Machine
from meshdsl.lowering.backends.numpy.namespace import wide
from meshdsl.lowering.parameters import Indexed, RowSums, Update, parameters_of
from meshdsl.lowering.program import Instruction
from meshdsl.tensors.dims import Shape
from meshdsl.tensors.dtypes import identity


def _permuted(array: np.ndarray, have: Shape, want: Sequence[str]) -> np.ndarray:
    """Returns an array [devices, *have] with its dims in another order: [devices, *want]."""
    return array.transpose(0, *(i + 1 for i in permutation(have.names, want)))


def _grid(index: np.ndarray, count: int) -> list[np.ndarray]:
    """Returns each element's position along the first `count` dims of an index array."""
    return [
        np.broadcast_to(i, index.shape) for i in np.ogrid[tuple(map(slice, index.shape))][:count]
    ]


def _take(machine: Machine, instruction: Instruction, inputs: Arrays) -> np.ndarray:
    """Returns the positions of a table at indices; zeros for indices outside of it."""
    table, indices = (v.local for v in instruction.inputs)
    (out,), params = instruction.outputs, parameters_of(instruction, Indexed)
    dim, shared = params["dim"], params["pairs"]
    index_dims, rest = indices.without(shared).names, table.without([dim, *shared]).names
    rows = _permuted(inputs[0], table, [*shared, dim, *rest])
    index = _permuted(inputs[1], indices, [*shared, *index_dims])
    inside = (index >= 0) & (index < table.get(dim).size)
    result = rows[*_grid(index, 1 + len(shared)), np.where(inside, index, 0)]
    mask = inside.reshape(*inside.shape, *(1,) * len(rest))
    result = np.where(mask, result, np.zeros((), result.dtype))
    names = (*shared, *index_dims, *rest)
    return result.transpose(0, *(i + 1 for i in permutation(names, out.local.names)))


def _scatter(combine: Any, kind: str) -> Emitter:
    """Returns the emitter of a scatter; indices outside of the dim are dropped."""

    def emit(machine: Machine, instruction: Instruction, inputs: Arrays) -> np.ndarray:
        updates, indices = (v.local for v in instruction.inputs)
        (out,), params = instruction.outputs, parameters_of(instruction, Indexed)
        dim, shared = params["dim"], params["pairs"]
        index_dims, rest = indices.without(shared).names, out.local.without([dim, *shared])
        index = _permuted(inputs[1], indices, [*shared, *index_dims])
        update = wide(_permuted(inputs[0], updates, [*shared, *index_dims, *rest.names]))
        sizes = (*index.shape[: 1 + len(shared)], out.local.get(dim).size, *rest.sizes)
        rows = np.full(sizes, identity(kind, out.dtype), update.dtype)
        inside = (index >= 0) & (index < out.local.get(dim).size)
        at = [grid[inside] for grid in _grid(index, 1 + len(shared))]
        combine.at(rows, (*at, index[inside]), update[inside])
        names = (*shared, dim, *rest.names)
        order = (0, *(i + 1 for i in permutation(names, out.local.names)))
        return rows.transpose(order).astype(out.dtype)

    return emit


def _row_sums(machine: Machine, instruction: Instruction, inputs: Arrays) -> Any:
    """Returns the sums of each row's updates, and the rows, by sorting the indices."""
    updates, indices = (v.local for v in instruction.inputs)
    params, (sums, places) = parameters_of(instruction, RowSums), instruction.outputs
    size, index_dims = params["size"], indices.without(params["pairs"])
    names, rest = (*params["pairs"], *index_dims.names), updates.without(indices.names)
    index = _permuted(inputs[1], indices, names)
    update = wide(_permuted(inputs[0], updates, [*names, *rest.names]))
    shape, flat = update.shape, index.reshape(*index.shape[: 1 + len(params["pairs"])], -1)
    rows = np.where((flat >= 0) & (flat < size), flat, size)
    order = np.argsort(rows, axis=-1, kind="stable")
    rows = np.take_along_axis(rows, order, -1)
    begins = np.diff(rows, axis=-1, prepend=-1) > 0
    first = np.maximum.accumulate(np.where(begins, np.arange(flat.shape[-1]), 0), axis=-1)
    grid = _grid(flat, flat.ndim - 1)
    moved = update.reshape(*flat.shape, *rest.sizes)[*grid, order]
    moved[rows == size] = 0
    added = np.zeros_like(moved)
    np.add.at(added, (*grid, first), moved)
    back = (0, *(i + 1 for i in permutation([*names, *rest.names], updates.names)))
    where = (0, *(i + 1 for i in permutation(names, indices.names)))
    return (
        added.reshape(shape).transpose(back).astype(sums.dtype),
        rows.reshape(index.shape).transpose(where).astype(places.dtype),
    )


def _add_rows(machine: Machine, instruction: Instruction, inputs: Arrays) -> np.ndarray:
    """Returns a table with the sums of `row_sums` added to its rows."""
    table, sums, places = (v.local for v in instruction.inputs)
    params = parameters_of(instruction, Indexed)
    dim, shared = params["dim"], params["pairs"]
    names, rest = (*shared, *places.without(shared).names), table.without([dim, *shared]).names
    index = _permuted(inputs[2], places, names)
    rows = wide(_permuted(inputs[0], table, [*shared, dim, *rest])).copy()
    inside = index < table.get(dim).size
    at = [grid[inside] for grid in _grid(index, 1 + len(shared))]
    moved = _permuted(inputs[1], sums, [*names, *rest])[inside]
    np.add.at(rows, (*at, index[inside]), moved.astype(rows.dtype))
    order = (0, *(i + 1 for i in permutation([*shared, dim, *rest], table.names)))
    return rows.transpose(order).astype(instruction.outputs[0].dtype)


def _update(machine: Machine, instruction: Instruction, inputs: Arrays) -> np.ndarray:
    """Returns an operand with a piece in it; what would exceed the dim is ignored."""
    target, part, _ = (v.local for v in instruction.inputs)
    params = parameters_of(instruction, Update)
    dim, part_dim = params["dim"], params["part"]
    at, size = target.position(dim), part.get(part_dim).size
    want = [part_dim if name == dim else name for name in target.names]
    result, pieces = inputs[0].copy(), _permuted(inputs[1], part, want)
    for row, piece, start in zip(result, pieces, inputs[2], strict=True):
        if start.ndim:
            inside = (start >= 0) & (start < row.shape[at])
            np.moveaxis(row, at, 0)[start[inside]] = np.moveaxis(piece, at, 0)[inside]
        elif 0 <= start <= row.shape[at] - size:
            np.moveaxis(row, at, 0)[start : start + size] = np.moveaxis(piece, at, 0)
    return result


EMITTERS: Mapping[str, Emitter] = {
    "take": _take,
    "update": _update,
    "row_sums": _row_sums,
    "add_rows": _add_rows,
    "scatter_add": _scatter(np.add, "sum"),
    "scatter_max": _scatter(np.maximum, "max"),
    "scatter_min": _scatter(np.minimum, "min"),
}
