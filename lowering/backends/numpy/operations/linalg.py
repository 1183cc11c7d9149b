"""Linear algebra on the matrices of one shard, with numpy.linalg and SciPy.

If a function fails for a matrix, its results are NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from scipy import linalg  # type: ignore[import-untyped]

from meshdsl.lowering.backends.common.matrices import factors, solve
from meshdsl.lowering.backends.numpy.machine import Emitter
from meshdsl.lowering.parameters import Triangular, parameters_of
from meshdsl.lowering.program import Instruction


def _each(function: Callable, shapes: Sequence[tuple[int, ...]], *stacks: np.ndarray) -> list:
    """Applies a function to each matrix of stacks [..., rows, columns] with the same lead axes."""
    lead = stacks[0].shape[:-2]
    results = [np.full(shape, np.nan, stacks[0].dtype) for shape in shapes]
    for at in np.ndindex(*lead):
        try:
            matrices = function(*(stack[at] for stack in stacks))
        except np.linalg.LinAlgError:
            continue
        for result, matrix in zip(results, matrices, strict=True):
            result[at] = matrix
    return results


def _factors(function: Callable[[np.ndarray], Sequence[np.ndarray]]) -> Emitter:
    """Returns the emitter of a function of one matrix, which returns several arrays."""

    def each(x: np.ndarray) -> Sequence[np.ndarray]:
        example = function(np.eye(*x.shape[-2:], dtype=x.dtype))
        return _each(function, [(*x.shape[:-2], *array.shape) for array in example], x)

    return factors(each)


def _solver(instruction: Instruction, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return _each(lambda a, b: (np.linalg.solve(a, b),), [b.shape], a, b)[0]


def _triangular(instruction: Instruction, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    params = parameters_of(instruction, Triangular)
    lower, unit = params["lower"], params["unit_diagonal"]

    def solved(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray]:
        x = linalg.solve_triangular(a, b, lower=lower, unit_diagonal=unit, check_finite=False)
        return (x,)

    return _each(solved, [b.shape], a, b)[0]


def _cholesky(x: np.ndarray) -> np.ndarray:
    return _each(lambda x: (np.linalg.cholesky((x + x.T) / 2),), [x.shape], x)[0]


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
    "cholesky": factors(_cholesky),
    "qr": _factors(_qr),
    "eigh": _factors(_eigh),
    "svd": _factors(_svd),
    "slogdet": _factors(np.linalg.slogdet),
    "solve": solve(_solver),
    "triangular_solve": solve(_triangular),
}
