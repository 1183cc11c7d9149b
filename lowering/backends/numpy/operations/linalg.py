"""Linear algebra on the matrices of one shard: numpy.linalg and SciPy.

Matrices that a function cannot deal with give NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from scipy import linalg  # type: ignore[import-untyped]

from meshdsl.lowering.backends.common.arrange import align
from meshdsl.lowering.backends.numpy import namespace as xp
from meshdsl.lowering.backends.numpy.machine import Arrays, Emitter, Machine
from meshdsl.lowering.program import Instruction
from meshdsl.tensors.dims import Shape


def _factors(function: Callable[[np.ndarray], Sequence[np.ndarray]]) -> Emitter:
    """Returns the emitter of a function of matrices in the two last dims."""

    def emit(machine: Machine, instruction: Instruction, inputs: Arrays) -> Any:
        local, names = instruction.inputs[0].local, _matrix(instruction)
        ordered = Shape([*local.without(names), *local.select(names)])
        x = align(xp, inputs[0], local, ordered)
        shapes = [(machine.mesh.size, *value.local.sizes) for value in instruction.outputs]
        if instruction.op == "cholesky":
            return align(xp, _each(function, [x.shape], x)[0], ordered, local)
        return tuple(_each(function, shapes, x))

    return emit


def _each(function: Callable, shapes: Sequence[tuple[int, ...]], *stacks: np.ndarray) -> list:
    """Applies a function to one matrix after another, of stacks that are equally deep."""
    depth = stacks[0].shape[:-2]
    results = [np.full(shape, np.nan, stacks[0].dtype) for shape in shapes]
    for at in np.ndindex(*depth):
        try:
            found = function(*(stack[at] for stack in stacks))
        except np.linalg.LinAlgError:
            continue
        for result, one in zip(results, found, strict=True):
            result[at] = one
    return results


def _matrix(instruction: Instruction) -> list[str]:
    return [instruction.params["rows"], instruction.params["columns"]]


def _solve(function: Callable[..., Any]) -> Emitter:
    """Returns the emitter of a solver, which takes right sides as the columns of a matrix."""

    def emit(machine: Machine, instruction: Instruction, inputs: Arrays) -> Any:
        left, right = (value.local for value in instruction.inputs)
        (out,), (row, column) = instruction.outputs, left.select(_matrix(instruction))
        batch = left.without([row.name, column.name])
        sides = right.without([row.name, *batch.names])
        a = align(xp, inputs[0], left, Shape([*batch, row, column]))
        b = align(xp, inputs[1], right, Shape([*batch, row, *sides]))
        flat = b.reshape(machine.mesh.size, *batch.sizes, row.size, sides.volume)
        x = function(instruction, a, flat)
        x = x.reshape(machine.mesh.size, *batch.sizes, column.size, *sides.sizes)
        return align(xp, x, Shape([*batch, column, *sides]), out.local)

    return emit


def _solver(instruction: Instruction, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return _each(lambda a, b: (np.linalg.solve(a, b),), [b.shape], a, b)[0]


def _triangular(instruction: Instruction, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    lower, unit = instruction.params["lower"], instruction.params["unit_diagonal"]

    def solve(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray]:
        found = linalg.solve_triangular(a, b, lower=lower, unit_diagonal=unit, check_finite=False)
        return (found,)

    return _each(solve, [b.shape], a, b)[0]


def _cholesky(x: np.ndarray) -> Sequence[np.ndarray]:
    return (np.linalg.cholesky((x + x.T) / 2),)


def _qr(x: np.ndarray) -> Sequence[np.ndarray]:
    q, r = np.linalg.qr(x)
    sign = np.where(np.diagonal(r) < 0, -1, 1)
    return q * sign, r * sign[:, None]


def _signs(vectors: np.ndarray) -> np.ndarray:
    """Returns the signs of the elements of largest magnitude, one per column."""
    largest = np.take_along_axis(vectors, np.abs(vectors).argmax(0, keepdims=True), 0)
    return np.where(largest[0] < 0, -1, 1)


def _eigh(x: np.ndarray) -> Sequence[np.ndarray]:
    values, vectors = np.linalg.eigh((x + x.T) / 2)
    return values, vectors * _signs(vectors)


def _svd(x: np.ndarray) -> Sequence[np.ndarray]:
    u, s, v = np.linalg.svd(x, full_matrices=False)
    signs = _signs(u)
    return u * signs, s, v * signs[:, None]


EMITTERS: Mapping[str, Emitter] = {
    "cholesky": _factors(_cholesky),
    "qr": _factors(_qr),
    "eigh": _factors(_eigh),
    "svd": _factors(_svd),
    "slogdet": _factors(np.linalg.slogdet),
    "solve": _solve(_solver),
    "triangular_solve": _solve(_triangular),
}
