"""Linear algebra on the matrices of one shard: jax.numpy.linalg."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from meshdsl.lowering.backends.common.arrange import align
from meshdsl.lowering.backends.jax import namespace as xp
from meshdsl.lowering.backends.jax.machine import Arrays, Emitter, Machine
from meshdsl.lowering.program import Instruction
from meshdsl.tensors.dims import Shape


def _factors(function: Callable[[Any], Sequence[Any]]) -> Emitter:
    """Returns the emitter of a function of matrices in the two last dims."""

    def emit(machine: Machine, instruction: Instruction, inputs: Arrays) -> Any:
        local, names = instruction.inputs[0].local, _matrix(instruction)
        ordered = Shape([*local.without(names), *local.select(names)])
        results = function(align(xp, inputs[0], local, ordered))
        if instruction.op == "cholesky":
            return align(xp, results, ordered, local)
        return tuple(results)

    return emit


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
        flat = b.reshape(*batch.sizes, row.size, sides.volume)
        x = function(instruction, a, flat).reshape(*batch.sizes, column.size, *sides.sizes)
        return align(xp, x, Shape([*batch, column, *sides]), out.local)

    return emit


def _triangular(instruction: Instruction, a: Any, b: Any) -> Any:
    params = instruction.params
    return lax.linalg.triangular_solve(
        a, b, left_side=True, lower=params["lower"], unit_diagonal=params["unit_diagonal"]
    )


def _cholesky(x: Any) -> Any:
    return jnp.linalg.cholesky(x, symmetrize_input=True)


def _qr(x: Any) -> Sequence[Any]:
    q, r = jnp.linalg.qr(x)
    sign = jnp.where(jnp.diagonal(r, axis1=-2, axis2=-1) < 0, -1, 1).astype(x.dtype)
    return q * sign[..., None, :], r * sign[..., None]


def _signs(vectors: Any) -> Any:
    """Returns the signs of the elements of largest magnitude: [..., 1, vectors]."""
    at = jnp.argmax(jnp.abs(vectors), axis=-2, keepdims=True)
    largest = jnp.take_along_axis(vectors, at, axis=-2)
    return jnp.where(largest < 0, -1, 1).astype(vectors.dtype)


def _eigh(x: Any) -> Sequence[Any]:
    values, vectors = jnp.linalg.eigh(x, symmetrize_input=True)
    return values, vectors * _signs(vectors)


def _svd(x: Any) -> Sequence[Any]:
    u, s, v = jnp.linalg.svd(x, full_matrices=False)
    signs = _signs(u)
    return u * signs, s, v * jnp.swapaxes(signs, -1, -2)


EMITTERS: Mapping[str, Emitter] = {
    "cholesky": _factors(_cholesky),
    "qr": _factors(_qr),
    "eigh": _factors(_eigh),
    "svd": _factors(_svd),
    "slogdet": _factors(jnp.linalg.slogdet),
    "solve": _solve(lambda instruction, a, b: jnp.linalg.solve(a, b)),
    "triangular_solve": _solve(_triangular),
}
