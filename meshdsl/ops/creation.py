"""Tensors from nothing: constants and index ramps; and operands as tensors."""

from __future__ import annotations

from typing import Any

import numpy as np

from meshdsl.array import NamedArray
from meshdsl.dims import Dimension, DimsLike, Shape, as_list
from meshdsl.dtypes import as_dtype, is_float, is_integer
from meshdsl.graph import Primitive, Tensor
from meshdsl.ops.literal import literal
from meshdsl.ops.operation import operation
from meshdsl.trace import bind_one

FULL = Primitive("full", lambda inputs, params: [(params["shape"], params["dtype"])])
ARANGE = Primitive("arange", lambda inputs, params: [(params["shape"], params["dtype"])])


def sized(dims: DimsLike) -> Shape:
    """Returns dims as a shape; a bare name is an error, since nothing gives it a size."""
    listed = as_list(dims)
    bare = [dim for dim in listed if not isinstance(dim, Dimension)]
    if bare:
        raise ValueError(f"{', '.join(map(repr, bare))} has no size here; give a md.Dimension")
    return Shape(dim for dim in listed if isinstance(dim, Dimension))


def _check_range(number: float | bool, dtype: np.dtype) -> None:
    """Raises ValueError where an integer dtype does not hold the number exactly."""
    if is_integer(dtype):
        limits = np.iinfo(dtype)
        if not limits.min <= number <= limits.max or number != int(number):
            raise ValueError(
                f"{dtype.name} holds whole numbers from {limits.min} to {limits.max}, not {number}"
            )


@operation
def full(dims: DimsLike, value: float | bool, dtype: Any = "float32") -> Tensor:
    """Returns a tensor filled with one Python number."""
    dtype = as_dtype(dtype)
    _check_range(value, dtype)
    return bind_one(FULL, (), {"value": value, "shape": sized(dims), "dtype": dtype})


def zeros(dims: DimsLike, dtype: Any = "float32") -> Tensor:
    """Returns a tensor of zeros."""
    return full(dims, 0, dtype)


def ones(dims: DimsLike, dtype: Any = "float32") -> Tensor:
    """Returns a tensor of ones."""
    return full(dims, 1, dtype)


@operation
def arange(dim: Dimension, dtype: Any = "int32") -> Tensor:
    """Returns 0, 1, ... along `dim`."""
    dtype = as_dtype(dtype)
    _check_range(dim.size - 1, dtype)
    return bind_one(ARANGE, (), {"shape": sized(dim), "dtype": dtype})


def as_tensor(value: Any, like: np.dtype | None = None) -> Tensor:
    """Returns an operand as a tensor.

    A Python number takes the dtype `like`; a NamedArray becomes a literal.

    Raises:
        ValueError: a fractional number meets an integer tensor, a bool meets numbers, or the
            operand is of another type.
    """
    if isinstance(value, Tensor):
        return value
    if isinstance(value, NamedArray):
        return literal(value)
    if isinstance(value, bool | int | float | np.bool_ | np.integer | np.floating):
        number = value.item() if isinstance(value, np.generic) else value
        if like is None:
            like = np.dtype(
                "bool"
                if isinstance(number, bool)
                else "int32"
                if isinstance(number, int)
                else "float32"
            )
        if is_integer(like) and isinstance(number, float):
            raise ValueError(
                f"the number {number} would be rounded to the tensor's dtype {like.name}; "
                "cast the tensor first, as in md.cast(x, 'float32')"
            )
        if like == np.bool_ and not isinstance(number, bool):
            raise ValueError(f"the number {number} meets a bool tensor; cast the tensor first")
        if isinstance(number, bool) and like != np.bool_:
            raise ValueError(
                f"the bool {number} meets a tensor of numbers; write {int(number)} instead"
            )
        if is_float(like):
            number = float(number)
        _check_range(number, like)
        return bind_one(FULL, (), {"value": number, "shape": Shape(), "dtype": like})
    raise ValueError(
        f"{type(value).__name__} is not an operand; use a tensor, a Python number, or "
        "md.named(array, dims)"
    )
