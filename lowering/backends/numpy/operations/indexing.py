"""Look-up by index, and putting together by index."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from meshdsl.lowering.backends.common.arrange import permutation
from meshdsl.lowering.backends.numpy.machine import Arrays, Emitter, Machine
from meshdsl.lowering.backends.numpy.namespace import wide
from meshdsl.lowering.parameters import Indexed, Update, parameters_of
from meshdsl.lowering.program import Instruction
from meshdsl.tensors.dims import Shape
from meshdsl.tensors.dtypes import identity


def _lay(array: np.ndarray, have: Shape, want: Sequence[str]) -> np.ndarray:
    """Orders the dims of an array, behind that of the devices."""
    return array.transpose(0, *(i + 1 for i in permutation(have.names, want)))


def _grid(index: np.ndarray, count: int) -> list[np.ndarray]:
    """Returns each element's position along the first `count` dims of an index array."""
    return [
        np.broadcast_to(i, index.shape) for i in np.ogrid[tuple(map(slice, index.shape))][:count]
    ]


def _take(machine: Machine, instruction: Instruction, inputs: Arrays) -> np.ndarray:
    table, indices = (v.local for v in instruction.inputs)
    (out,), params = instruction.outputs, parameters_of(instruction, Indexed)
    dim, shared = params["dim"], params["pairs"]
    places, rest = indices.without(shared).names, table.without([dim, *shared]).names
    rows = _lay(inputs[0], table, [*shared, dim, *rest])
    index = _lay(inputs[1], indices, [*shared, *places])
    inside = (index >= 0) & (index < table.get(dim).size)
    found = rows[*_grid(index, 1 + len(shared)), np.where(inside, index, 0)]
    mask = inside.reshape(*inside.shape, *(1,) * len(rest))
    found = np.where(mask, found, np.zeros((), found.dtype))
    held = (*shared, *places, *rest)
    return found.transpose(0, *(i + 1 for i in permutation(held, out.local.names)))


def _scatter(combine: Any, kind: str) -> Emitter:
    def emit(machine: Machine, instruction: Instruction, inputs: Arrays) -> np.ndarray:
        updates, indices = (v.local for v in instruction.inputs)
        (out,), params = instruction.outputs, parameters_of(instruction, Indexed)
        dim, shared = params["dim"], params["pairs"]
        places, rest = indices.without(shared).names, out.local.without([dim, *shared])
        index = _lay(inputs[1], indices, [*shared, *places])
        update = wide(_lay(inputs[0], updates, [*shared, *places, *rest.names]))
        sizes = (*index.shape[: 1 + len(shared)], out.local.get(dim).size, *rest.sizes)
        rows = np.full(sizes, identity(kind, out.dtype), update.dtype)
        inside = (index >= 0) & (index < out.local.get(dim).size)
        at = [grid[inside] for grid in _grid(index, 1 + len(shared))]
        combine.at(rows, (*at, index[inside]), update[inside])
        held = (*shared, dim, *rest.names)
        order = (0, *(i + 1 for i in permutation(held, out.local.names)))
        return rows.transpose(order).astype(out.dtype)

    return emit


def _update(machine: Machine, instruction: Instruction, inputs: Arrays) -> np.ndarray:
    target, part, _ = (v.local for v in instruction.inputs)
    params = parameters_of(instruction, Update)
    dim, own = params["dim"], params["part"]
    at, size = target.position(dim), part.get(own).size
    want = [own if name == dim else name for name in target.names]
    result, pieces = inputs[0].copy(), _lay(inputs[1], part, want)
    for row, piece, start in zip(result, pieces, inputs[2], strict=True):
        if 0 <= start <= row.shape[at] - size:
            np.moveaxis(row, at, 0)[start : start + size] = np.moveaxis(piece, at, 0)
    return result


EMITTERS: Mapping[str, Emitter] = {
    "take": _take,
    "update": _update,
    "scatter_add": _scatter(np.add, "sum"),
    "scatter_max": _scatter(np.maximum, "max"),
    "scatter_min": _scatter(np.minimum, "min"),
}
