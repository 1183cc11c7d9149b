"""Linear algebra: solving linear systems, and what follows from it.

A matrix is two named dims of a tensor, `rows` and `columns`; every other dim is a batch of them. A
matrix maps its columns to its rows: `md.einsum(a, x, over=columns)` has rows, and `solve` turns
rows into columns. Matrix dims are gathered on every device. The others stay split, and are split
over the axes of the matrix dims too where they can be.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from meshdsl.ops.creation import arange
from meshdsl.ops.elementwise.arithmetic import exp, where
from meshdsl.ops.operation import operation
from meshdsl.ops.products.einsum import einsum
from meshdsl.ops.products.factorizations import eigh, qr, svd
from meshdsl.ops.products.matrices import (
    diagonal,
    identity,
    matrix,
    swap,
    symmetric,
    trace,
    triangle,
    with_diagonal,
)
from meshdsl.ops.shapes.shape import broadcast, rename
from meshdsl.tensors.dims import Dimension, DimLike, Shape, unused
from meshdsl.tensors.dtypes import short
from meshdsl.tensors.tensor import Tensor
from meshdsl.tracing.graph import Aval, Operation, Primitive
from meshdsl.tracing.trace import bind, bind_one

__all__ = [
    "cholesky",
    "cholesky_solve",
    "determinant",
    "diagonal",
    "eigh",
    "identity",
    "inverse",
    "qr",
    "slogdet",
    "solve",
    "svd",
    "trace",
    "triangle",
    "triangular_solve",
    "with_diagonal",
]


def _same(inputs: Sequence[Tensor], params: Mapping[str, Any]) -> list[Aval]:
    return [(inputs[0].shape, inputs[0].dtype)]


def _solve_rule(inputs: Sequence[Tensor], params: Mapping[str, Any]) -> list[Aval]:
    a, b = inputs
    rows, columns = params["rows"], params["columns"]
    solved = a.shape.get(columns)
    return [(Shape(solved if dim.name == rows else dim for dim in b.shape), b.dtype)]


def _slogdet_rule(inputs: Sequence[Tensor], params: Mapping[str, Any]) -> list[Aval]:
    (x,) = inputs
    shape = x.shape.without([params["rows"], params["columns"]])
    return [(shape, x.dtype), (shape, x.dtype)]


def _cholesky_gradient(
    op: Operation, cotangents: Sequence, wanted: Sequence[bool]
) -> list[Tensor | None]:
    """Murray 2016, "Differentiation of the Cholesky decomposition", equation 10."""
    (low,), (g,) = op.outputs, cotangents
    i, j = op.params["rows"], op.params["columns"]
    k = unused(j, low.shape)
    product = einsum(rename(low, {j: k}), g, over=i)  # lowᵀ g, with rows k
    row, column = arange(product.shape.get(k)), arange(product.shape.get(j))
    half = where(row > column, product, where(row == column, 0.5 * product, 0))
    left = triangular_solve(low, swap(half, k, j), j, i, lower=False)  # low⁻ᵀ half, columns k
    both = triangular_solve(rename(low, {i: j, j: k}), left, k, j, lower=False)
    return [symmetric(both, i, j)]


def _solve_gradient(
    op: Operation, cotangents: Sequence, wanted: Sequence[bool]
) -> list[Tensor | None]:
    (a, _), (x,), (g,) = op.inputs, op.outputs, cotangents
    rows, columns = op.params["rows"], op.params["columns"]
    if op.name == "solve":
        by_b = solve(a, g, columns, rows)
    else:
        lower, unit = not op.params["lower"], op.params["unit_diagonal"]
        by_b = triangular_solve(a, g, columns, rows, lower, unit)
    if not wanted[0]:
        return [None, by_b]
    by_a = -einsum(by_b, x, out=a.shape)
    if op.name == "triangular_solve":
        strict = op.params["unit_diagonal"]
        by_a = triangle(by_a, rows, columns, op.params["lower"], strict)
    return [by_a, by_b]


def _slogdet_gradient(
    op: Operation, cotangents: Sequence, wanted: Sequence[bool]
) -> list[Tensor | None]:
    (x,), (_, g) = op.inputs, cotangents
    return [None if g is None else g * inverse(x, op.params["rows"], op.params["columns"])]


CHOLESKY = Primitive("cholesky", _same, _cholesky_gradient)
SOLVE = Primitive("solve", _solve_rule, _solve_gradient, linear=(1,))
TRIANGULAR_SOLVE = Primitive("triangular_solve", _solve_rule, _solve_gradient, linear=(1,))
SLOGDET = Primitive("slogdet", _slogdet_rule, _slogdet_gradient)


def _system(a: Tensor, b: Tensor, rows: DimLike, columns: DimLike) -> tuple[Dimension, Tensor]:
    """Returns the rows of a linear system, and its right side with every batch dim of a.

    Raises:
        ValueError: the matrix and the right side do not fit.
    """
    row, column = matrix(a, rows, columns, real=False)
    if a.dtype != b.dtype:
        raise ValueError(f"dtypes differ: {short(a.dtype)} and {short(b.dtype)}; cast one of them")
    b.shape.get(row)
    if b.shape.find(column.name) is not None:
        raise ValueError(
            f"the right side has the dim `{column.name}`, which is to name the solution's; "
            "rename it there"
        )
    for dim in a.shape.without([row.name, column.name]):
        if b.shape.find(dim.name) is not None:
            b.shape.get(dim)
    missing = a.shape.without([column.name, *b.shape.names])
    return row, broadcast(b, [*missing, *b.shape])


@operation
def solve(a: Tensor, b: Tensor, rows: DimLike, columns: DimLike) -> Tensor:
    """Returns x with `einsum(a, x, over=columns)` = b, for a square matrix a.

    `x = md.linalg.solve(a, b, "row", "column")`: b has the dim `row`, x has `column` in its place.
    Dims that a lacks are right sides; dims that only a has are batched. A singular matrix gives
    infinities or NaN.

    Raises:
        ValueError: a is not square, b lacks `rows` or has `columns`, or the dtypes differ.

    Examples:
        >>> a = md.named([[0.0, 2.0], [1.0, 0.0]], ["row", "column"])
        >>> b = md.named([[4.0, 2.0], [3.0, 6.0]], ["row", "right"])
        >>> x = md.linalg.solve(a, b, "row", "column")
        >>> print(x)
        f32[column=2, right=2] [[3. 6.]
         [2. 1.]]
        >>> np.allclose(md.einsum(a, x, over="column"), b)
        True
    """
    row, b = _system(a, b, rows, columns)
    params = {"rows": row.name, "columns": a.shape.get(columns).name}
    return bind_one(SOLVE, (a, b), params)


@operation
def triangular_solve(
    a: Tensor,
    b: Tensor,
    rows: DimLike,
    columns: DimLike,
    lower: bool = True,
    unit_diagonal: bool = False,
) -> Tensor:
    """Returns x with `einsum(a, x, over=columns)` = b, for a triangular matrix a.

    `x = md.linalg.triangular_solve(a, b, "row", "column")`; only one triangle of a is read, and
    with `unit_diagonal` its diagonal counts as 1. Otherwise as `solve`.

    Raises:
        ValueError: a is not square, b lacks `rows` or has `columns`, or the dtypes differ.

    Examples:
        >>> a = md.named([[2.0, 9.0], [1.0, 4.0]], ["row", "column"])  # the 9 is not read
        >>> b = md.named([2.0, 9.0], ["row"])
        >>> print(md.linalg.triangular_solve(a, b, "row", "column"))
        f32[column=2] [1. 2.]
    """
    row, b = _system(a, b, rows, columns)
    params = {"rows": row.name, "columns": a.shape.get(columns).name}
    return bind_one(
        TRIANGULAR_SOLVE, (a, b), {**params, "lower": lower, "unit_diagonal": unit_diagonal}
    )


@operation
def cholesky(x: Tensor, rows: DimLike, columns: DimLike) -> Tensor:
    """Returns the lower triangular matrix whose product with its transpose is x.

    `low = md.linalg.cholesky(x, "row", "column")`. x is replaced by (x + xᵀ) / 2; where that is
    not positive definite, the result is NaN.

    Raises:
        ValueError: x lacks one of the dims, is not square, or is neither float32 nor float64.

    Examples:
        >>> x = md.named([[4.0, 2.0], [2.0, 5.0]], ["row", "column"])
        >>> print(md.linalg.cholesky(x, "row", "column"))
        f32[row=2, column=2] [[2. 0.]
         [1. 2.]]
    """
    row, column = matrix(x, rows, columns)
    return bind_one(CHOLESKY, (x,), {"rows": row.name, "columns": column.name})


@operation
def cholesky_solve(low: Tensor, b: Tensor, rows: DimLike, columns: DimLike) -> Tensor:
    """Returns `solve(a, b, rows, columns)` from the `low = cholesky(a, rows, columns)` of a.

    `md.linalg.cholesky_solve(low, b, "row", "column")`.

    Raises:
        ValueError: `low` is not square, b lacks `rows` or has `columns`, or the dtypes differ.

    Examples:
        >>> x = md.named([[4.0, 2.0], [2.0, 5.0]], ["row", "column"])
        >>> low = md.linalg.cholesky(x, "row", "column")
        >>> b = md.named([8.0, 8.0], ["row"])
        >>> print(md.linalg.cholesky_solve(low, b, "row", "column"))
        f32[column=2] [1.5 1. ]
    """
    row, column = matrix(low, rows, columns)
    k = unused(column.name, low.shape, b.shape)
    half = triangular_solve(rename(low, {column.name: k}), b, row, k)
    turned = rename(low, {row.name: column.name, column.name: k})
    return triangular_solve(turned, half, k, column, lower=False)


@operation
def inverse(x: Tensor, rows: DimLike, columns: DimLike) -> Tensor:
    """Returns the inverse of a square matrix, which maps its rows to its columns.

    `md.linalg.inverse(x, "row", "column")`: the product with b over `row` is `solve(x, b, ...)`.

    Raises:
        ValueError: x lacks one of the dims, is not square, or has neither real nor complex numbers.

    Examples:
        >>> x = md.named([[2.0, 0.0], [0.0, 4.0]], ["row", "column"])
        >>> print(md.linalg.inverse(x, "row", "column"))
        f32[column=2, row=2] [[0.5  0.  ]
         [0.   0.25]]
    """
    row, column = matrix(x, rows, columns, real=False)
    side = Dimension(unused(row.name, x.shape), row.size)
    solved = solve(x, identity(row, side, x.dtype), row, column)
    return rename(solved, {side.name: row.name})


@operation
def slogdet(x: Tensor, rows: DimLike, columns: DimLike) -> tuple[Tensor, Tensor]:
    """Returns the sign of the determinant, and the logarithm of its magnitude.

    `sign, log = md.linalg.slogdet(x, "row", "column")`; a singular matrix gives 0 and -inf.

    Raises:
        ValueError: x lacks one of the dims, is not square, or is neither float32 nor float64.

    Examples:
        >>> x = md.named([[0.0, 1.0], [1.0, 0.0]], ["row", "column"])
        >>> sign, log = md.linalg.slogdet(x, "row", "column")
        >>> print(sign, log)
        f32[] -1. f32[] 0.
    """
    row, column = matrix(x, rows, columns)
    sign, log = bind(SLOGDET, (x,), {"rows": row.name, "columns": column.name}).outputs
    return sign, log


@operation
def determinant(x: Tensor, rows: DimLike, columns: DimLike) -> Tensor:
    """Returns the determinant of a square matrix; its gradient is NaN where that is 0.

    `md.linalg.determinant(x, "row", "column")`.

    Raises:
        ValueError: x lacks one of the dims, is not square, or is neither float32 nor float64.

    Examples:
        >>> x = np.array([[[2.0, 0.0], [0.0, 3.0]], [[0.0, 1.0], [1.0, 0.0]]], "float32")
        >>> x = md.named(x, ["batch", "row", "column"])
        >>> print(md.linalg.determinant(x, "row", "column"))
        f32[batch=2] [ 6. -1.]
    """
    sign, log = slogdet(x, rows, columns)
    return sign * exp(log)
