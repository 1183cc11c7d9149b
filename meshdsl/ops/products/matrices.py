"""Matrices among the dims of a tensor: which two dims they are, and their simplest parts."""

from __future__ import annotations

from typing import Any

from meshdsl.ops.creation import arange
from meshdsl.ops.elementwise.arithmetic import cast, equal, greater, greater_equal, where
from meshdsl.ops.elementwise.broadcasting import outer
from meshdsl.ops.operation import operation
from meshdsl.ops.reductions.reduction import sum
from meshdsl.ops.shapes.shape import rename, transpose
from meshdsl.tensors.dims import Dimension, DimLike, name_of
from meshdsl.tensors.dtypes import short
from meshdsl.tensors.tensor import Tensor

_REAL = ("float32", "float64")
_COMPLEX = (*_REAL, "complex64", "complex128")


def matrix(
    x: Tensor, rows: DimLike, columns: DimLike, *, square: bool = True, real: bool = True
) -> tuple[Dimension, Dimension]:
    """Returns the two dims of x that are a matrix.

    Raises:
        ValueError: they are one dim, their sizes differ in a square matrix, or the dtype has no
            linear algebra.
    """
    one, other = _two(x, rows, columns)
    if square and one.size != other.size:
        raise ValueError(f"needs a square matrix, got {one} rows and {other} columns")
    allowed = _REAL if real else _COMPLEX
    if x.dtype.name not in allowed:
        raise ValueError(f"needs {' or '.join(allowed)}, got {short(x.dtype)}; cast first")
    return one, other


def _two(x: Tensor, rows: DimLike, columns: DimLike) -> tuple[Dimension, Dimension]:
    """Returns two dims of x.

    Raises:
        ValueError: they are one dim.
    """
    one, other = x.shape.get(rows), x.shape.get(columns)
    if one == other:
        raise ValueError(f"rows and columns are one dim, `{one.name}`; a matrix has two")
    return one, other


def named_like(dim: DimLike, size: int, what: str) -> Dimension:
    """Returns the dim that names `size` things; a Dimension must have that size."""
    if isinstance(dim, Dimension) and dim.size != size:
        raise ValueError(f"{what} has size {size}, but {dim} is to name it")
    return Dimension(name_of(dim), size)


def swap(x: Tensor, rows: str, columns: str) -> Tensor:
    """Returns the transposed matrix: the two dims have each other's names."""
    return rename(x, {rows: columns, columns: rows})


def symmetric(x: Tensor, rows: str, columns: str) -> Tensor:
    """Returns (x + xᵀ) / 2."""
    return 0.5 * (x + swap(x, rows, columns))


@operation
def identity(rows: Dimension, columns: Dimension, dtype: Any = "float32") -> Tensor:
    """Returns 1 where the two dims have the same index, else 0: `md.linalg.identity(i, j)`.

    Raises:
        ValueError: a dim has a name only.

    Examples:
        >>> row, column = md.dims(row=2, column=3)
        >>> print(md.linalg.identity(row, column))
        f32[row=2, column=3] [[1. 0. 0.]
         [0. 1. 0.]]
    """
    return cast(outer(equal, arange(rows), arange(columns)), dtype)


@operation
def triangle(
    x: Tensor, rows: DimLike, columns: DimLike, lower: bool = True, strict: bool = False
) -> Tensor:
    """Returns the triangle of a matrix, with zeros elsewhere.

    `md.linalg.triangle(x, "row", "column")` is the lower one; `strict` leaves the diagonal out.

    Raises:
        ValueError: x lacks one of the dims, or both are one dim.

    Examples:
        >>> x = md.named([[1.0, 2.0], [3.0, 4.0]], ["row", "column"])
        >>> print(md.linalg.triangle(x, "row", "column"))
        f32[row=2, column=2] [[1. 0.]
         [3. 4.]]
        >>> print(md.linalg.triangle(x, "row", "column", lower=False, strict=True))
        f32[row=2, column=2] [[0. 2.]
         [0. 0.]]
    """
    i, j = map(arange, _two(x, rows, columns))
    if not lower:
        i, j = j, i
    return transpose(where(outer(greater if strict else greater_equal, i, j), x, 0), x.shape)


@operation
def diagonal(x: Tensor, rows: DimLike, columns: DimLike) -> Tensor:
    """Returns the diagonal of a matrix, along `rows`; 0 in rows that have no diagonal element.

    `md.linalg.diagonal(x, "row", "column")`.

    Raises:
        ValueError: x lacks one of the dims, or both are one dim.

    Examples:
        >>> x = md.named([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], ["row", "column"])
        >>> print(md.linalg.diagonal(x, "row", "column"))
        f32[row=3] [1. 4. 0.]
    """
    one, other = _two(x, rows, columns)
    return sum(where(outer(equal, arange(one), arange(other)), x, 0), other.name)


@operation
def trace(x: Tensor, rows: DimLike, columns: DimLike) -> Tensor:
    """Returns the sum of the diagonal of a matrix. `md.linalg.trace(x, "row", "column")`.

    Raises:
        ValueError: x lacks one of the dims, or both are one dim.

    Examples:
        >>> x = md.named([[[1.0, 2.0], [3.0, 4.0]]], ["batch", "row", "column"])
        >>> print(md.linalg.trace(x, "row", "column"))
        f32[batch=1] [5.]
    """
    return sum(diagonal(x, rows, columns), x.shape.get(rows).name)


@operation
def with_diagonal(x: Tensor, rows: DimLike, columns: Dimension) -> Tensor:
    """Returns the matrix whose diagonal is x and whose other elements are 0.

    `md.linalg.with_diagonal(x, "row", column)`; the matrix has one dim more than x.

    Raises:
        ValueError: x lacks `rows` or has `columns`, or `columns` has a name only.

    Examples:
        >>> x = md.named([1.0, 2.0], ["row"])
        >>> print(md.linalg.with_diagonal(x, "row", md.Dimension("column", 2)))
        f32[row=2, column=2] [[1. 0.]
         [0. 2.]]
    """
    i = x.shape.get(rows)
    full = outer(where, outer(equal, arange(i), arange(columns)), x, 0)
    return transpose(full, [*x.shape, columns])
