"""Grouped products: the rows of one group after the other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from meshdsl.lowering.backends.common.arrange import equation
from meshdsl.lowering.backends.numpy.machine import Arrays, Emitter, Machine
from meshdsl.lowering.backends.numpy.namespace import wide_factors
from meshdsl.lowering.parameters import AlongDim, parameters_of
from meshdsl.lowering.program import Instruction
from meshdsl.tensors.dims import Dimension, Shape

_ROW = Dimension("row_", 1)


def _rows(
    group: Shape, dim: str, numbers: np.ndarray, size: int
) -> Iterator[dict[str, np.ndarray]]:
    """Yields the rows of each group: their positions along the dims of `group`, and along `dim`."""
    names, numbers = group.names or ("",), numbers.reshape(group.sizes or (1,))
    for number in range(size):
        places = np.nonzero(numbers == number)
        if places[0].size:
            yield {**dict(zip(names, places, strict=True)), dim: numbers[places]}


def _at_rows(
    array: np.ndarray, shape: Shape, rows: Mapping[str, np.ndarray]
) -> tuple[np.ndarray, Shape]:
    """Returns a tensor at the positions of some rows, and its dims: [row_, the others]."""
    front = [i for i, name in enumerate(shape.names) if name in rows]
    back = [i for i, name in enumerate(shape.names) if name not in rows]
    if not front:
        return array, shape
    looked_up = array.transpose(*front, *back)[tuple(rows[shape.names[i]] for i in front)]
    return looked_up, Shape([_ROW, *(shape[i] for i in back)])


def _grouped(machine: Machine, instruction: Instruction, inputs: Arrays) -> np.ndarray:
    """Returns the products of rows with what their groups have; or of rows, summed by group."""
    x, y, group = (value.local for value in instruction.inputs)
    (out,), dim = instruction.outputs, parameters_of(instruction, AlongDim)["dim"]
    xs, ys = wide_factors(inputs[:2], instruction.outputs[0].dtype)
    results = np.zeros((len(xs), *out.local.sizes), xs.dtype)
    count = (y if y.find(dim) else out.local).get(dim).size
    for device in range(len(results)):
        for rows in _rows(group, dim, inputs[2][device], count):
            _add(results[device, ...], out.local, rows, (xs[device], x), (ys[device], y))
    return results.astype(out.dtype)


def _add(
    result: np.ndarray,
    out: Shape,
    rows: Mapping[str, np.ndarray],
    *factors: tuple[np.ndarray, Shape],
) -> None:
    """Adds the products of some rows to the result."""
    front = [i for i, name in enumerate(out.names) if name in rows]
    back = [i for i, name in enumerate(out.names) if name not in rows]
    looked_up = [_at_rows(array, shape, rows) for array, shape in factors]
    # Each row counts, though no factor may differ between them.
    ones = np.ones(len(next(iter(rows.values()))), result.dtype), Shape([_ROW])
    arrays, shapes = zip(*looked_up, ones, strict=True)
    target = Shape([*([_ROW] if front else []), *(out[i] for i in back)])
    product = np.einsum(equation(shapes, target), *arrays, optimize=True)
    np.add.at(result.transpose(*front, *back), tuple(rows[out.names[i]] for i in front), product)


EMITTERS: Mapping[str, Emitter] = {"grouped_einsum": _grouped, "grouped_outer": _grouped}
