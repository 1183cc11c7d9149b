"""Factorizations of matrices: QR, symmetric eigenvalues, singular values; see `linalg`.

Factors are made unique where the definition leaves a choice. R has a diagonal without negative
numbers. The (first) element of largest magnitude of each eigenvector or left singular vector is
positive. Where two eigenvalues or singular values are equal, vectors and the gradients through them
are one choice of many.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from meshdsl.ops.creation import zeros
from meshdsl.ops.elementwise.arithmetic import where
from meshdsl.ops.operation import operation
from meshdsl.ops.products.einsum import einsum
from meshdsl.ops.products.matrices import (
    matrix,
    named_like,
    swap,
    symmetric,
    triangle,
    with_diagonal,
)
from meshdsl.ops.shapes.shape import rename
from meshdsl.tensors.dims import DimLike, unused
from meshdsl.tensors.tensor import Tensor
from meshdsl.tracing.graph import Aval, Operation, Primitive
from meshdsl.tracing.trace import bind


def _avals(x: Tensor, params: Mapping[str, Any], *names: Sequence[str]) -> list[Aval]:
    """Returns one result per list of names: the batch dims of x, then those dims."""
    dims = {d.name: d for d in (*x.shape, params["inner"])}
    batch = x.shape.without([params["rows"], params["columns"]])
    return [(type(batch)([*batch, *(dims[n] for n in each)]), x.dtype) for each in names]


def _qr_rule(inputs: Sequence[Tensor], params: Mapping[str, Any]) -> list[Aval]:
    i, j, k = params["rows"], params["columns"], params["inner"].name
    return _avals(inputs[0], params, [i, k], [k, j])


def _eigh_rule(inputs: Sequence[Tensor], params: Mapping[str, Any]) -> list[Aval]:
    k = params["inner"].name
    return _avals(inputs[0], params, [k], [params["rows"], k])


def _svd_rule(inputs: Sequence[Tensor], params: Mapping[str, Any]) -> list[Aval]:
    i, j, k = params["rows"], params["columns"], params["inner"].name
    return _avals(inputs[0], params, [i, k], [k], [k, j])


def _or_zeros(cotangents: Sequence, outputs: Sequence[Tensor]) -> list[Tensor]:
    return [
        zeros(t.shape, t.dtype) if g is None else g
        for g, t in zip(cotangents, outputs, strict=True)
    ]


def _one_over_difference(values: Tensor, k: str, other: str) -> Tensor:
    """Returns 1 / (values along `other` - values along `k`), and 0 where they are equal."""
    apart = rename(values, {k: other}) - values
    return where(apart == 0, 0, 1 / where(apart == 0, 1, apart))


def _qr_gradient(op: Operation, cotangents: Sequence, wanted: Sequence[bool]) -> list[Tensor]:
    """Walter and Lehmann 2010, "Algorithmic differentiation of linear algebra functions", 2.2."""
    (q, r), (gq, gr) = op.outputs, _or_zeros(cotangents, op.outputs)
    i, j, k = op.params["rows"], op.params["columns"], op.params["inner"]
    if k.size < r.shape.get(j).size:
        raise ValueError(
            f"qr has a gradient only for matrices with at least as many rows as columns, not for "
            f"{op.inputs[0].shape}"
        )
    other = unused(k.name, q.shape, r.shape)
    product = einsum(r, rename(gr, {k.name: other}), over=j)
    product = product - einsum(gq, rename(q, {k.name: other}), over=i)
    strict = triangle(product, k.name, other, strict=True)
    copied = triangle(product, k.name, other) + swap(strict, k.name, other)
    left = gq + rename(einsum(q, copied, over=k.name), {other: k.name})
    # The solver's gradient is in `linalg`, which is made of factorizations.
    from meshdsl.ops.products.linalg import triangular_solve

    return [triangular_solve(r, left, k.name, j, lower=False)]


def _eigh_gradient(op: Operation, cotangents: Sequence, wanted: Sequence[bool]) -> list[Tensor]:
    """Giles 2008, "Collected matrix derivative results", section 3.1."""
    (w, v), (gw, gv) = op.outputs, _or_zeros(cotangents, op.outputs)
    i, j, k = op.params["rows"], op.params["columns"], op.params["inner"].name
    other = unused(k, v.shape, op.inputs[0].shape)
    inner = einsum(v, rename(gv, {k: other}), over=i) * _one_over_difference(w, k, other)
    inner = inner + with_diagonal(gw, k, inner.shape.get(other))
    right = rename(v, {i: j, k: other})
    return [symmetric(einsum(einsum(v, inner, over=k), right, over=other), i, j)]


def _svd_gradient(op: Operation, cotangents: Sequence, wanted: Sequence[bool]) -> list[Tensor]:
    """Townsend 2016, "Differentiating the singular value decomposition", equations 31 and on."""
    (u, s, v), (gu, gs, gv) = op.outputs, _or_zeros(cotangents, op.outputs)
    i, j, k = op.params["rows"], op.params["columns"], op.params["inner"].name
    other = unused(k, u.shape, v.shape)
    by_u = einsum(u, rename(gu, {k: other}), over=i)
    by_v = einsum(v, rename(gv, {k: other}), over=j)
    apart = _one_over_difference(s * s, k, other)
    inner = apart * (by_u - swap(by_u, k, other)) * rename(s, {k: other})
    inner = inner + s * apart * (by_v - swap(by_v, k, other))
    inner = inner + with_diagonal(gs, k, inner.shape.get(other))
    gradient = einsum(u, inner, rename(v, {k: other}), over=[k, other])
    if u.shape.get(i).size > s.shape.get(k).size:
        outside = gu - rename(einsum(u, by_u, over=k), {other: k})
        gradient = gradient + einsum(outside / s, v, over=k)
    if v.shape.get(j).size > s.shape.get(k).size:
        outside = gv - rename(einsum(v, by_v, over=k), {other: k})
        gradient = gradient + einsum(u, outside / s, over=k)
    return [gradient]


QR = Primitive("qr", _qr_rule, _qr_gradient)
EIGH = Primitive("eigh", _eigh_rule, _eigh_gradient)
SVD = Primitive("svd", _svd_rule, _svd_gradient)


def _factorize(
    primitive: Primitive, x: Tensor, rows: DimLike, columns: DimLike, inner: DimLike
) -> Sequence[Tensor]:
    row, column = matrix(x, rows, columns, square=primitive is EIGH)
    named = named_like(inner, min(row.size, column.size), "the inner dim of the factors")
    if x.shape.find(named.name) is not None:
        raise ValueError(f"`{named.name}` is a dim of {x} already; name the inner dim otherwise")
    params = {"rows": row.name, "columns": column.name, "inner": named}
    return bind(primitive, (x,), params).outputs


@operation
def qr(x: Tensor, rows: DimLike, columns: DimLike, inner: DimLike) -> tuple[Tensor, Tensor]:
    """Returns q, with orthonormal columns, and r, upper triangular, whose product is x.

    `q, r = md.linalg.qr(x, "row", "column", "inner")`: q has the dims row and inner, r has inner
    and column, and `md.einsum(q, r, over="inner")` is x. Its gradient needs at least as many rows
    as columns, and columns that are independent.

    Raises:
        ValueError: x lacks one of the dims, is neither float32 nor float64, or `inner` has another
            size than the smaller of the two.

    Examples:
        >>> x = md.named([[3.0, 1.0], [4.0, 2.0], [0.0, 0.0]], ["row", "column"])
        >>> q, r = md.linalg.qr(x, "row", "column", "inner")
        >>> print(q.dims, r.dims, np.allclose(md.einsum(q, r, over="inner"), x, atol=1e-6))
        [row=3, inner=2] [inner=2, column=2] True
    """
    q, r = _factorize(QR, x, rows, columns, inner)
    return q, r


@operation
def eigh(x: Tensor, rows: DimLike, columns: DimLike, inner: DimLike) -> tuple[Tensor, Tensor]:
    """Returns the eigenvalues of a symmetric matrix, ascending, and its eigenvectors.

    `values, vectors = md.linalg.eigh(x, "row", "column", "mode")`: values has the dim mode, vectors
    has row and mode. x is replaced by (x + xᵀ) / 2.

    Raises:
        ValueError: x lacks one of the dims, is not square, or is neither float32 nor float64.

    Examples:
        >>> x = md.named([[2.0, 0.0], [0.0, 1.0]], ["row", "column"])
        >>> values, vectors = md.linalg.eigh(x, "row", "column", "mode")
        >>> print(values, vectors.dims)
        f32[mode=2] [1. 2.] [row=2, mode=2]
    """
    values, vectors = _factorize(EIGH, x, rows, columns, inner)
    return values, vectors


@operation
def svd(x: Tensor, rows: DimLike, columns: DimLike, inner: DimLike) -> tuple[Tensor, ...]:
    """Returns u, s and v with x = `md.einsum(u, s, v, over=inner)`; s is descending.

    `u, s, v = md.linalg.svd(x, "row", "column", "mode")`: u has the dims row and mode, s has mode,
    and v has mode and column.

    Raises:
        ValueError: x lacks one of the dims, is neither float32 nor float64, or `inner` has another
            size than the smaller of the two.

    Examples:
        >>> x = md.named([[3.0, 0.0], [0.0, 4.0], [0.0, 0.0]], ["row", "column"])
        >>> u, s, v = md.linalg.svd(x, "row", "column", "mode")
        >>> print(u.dims, s, v.dims)
        [row=3, mode=2] f32[mode=2] [4. 3.] [mode=2, column=2]
    """
    u, s, v = _factorize(SVD, x, rows, columns, inner)
    return u, s, v
