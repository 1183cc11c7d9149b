"""Linear algebra on the matrices of one shard, with jax.numpy.linalg."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from meshdsl.lowering.backends.common.matrices import factors, solve
from meshdsl.lowering.backends.jax.machine import Emitter
from meshdsl.lowering.parameters import Triangular, parameters_of
from meshdsl.lowering.program import Instruction


def _triangular(instruction: Instruction, a: Any, b: Any) -> Any:
    params = parameters_of(instruction, Triangular)
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
    "cholesky": factors(_cholesky),
    "qr": factors(_qr),
    "eigh": factors(_eigh),
    "svd": factors(_svd),
    "slogdet": factors(jnp.linalg.slogdet),
    "solve": solve(lambda instruction, a, b: jnp.linalg.solve(a, b)),
    "triangular_solve": solve(_triangular),
}
