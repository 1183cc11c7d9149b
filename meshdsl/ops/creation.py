"""Constants: tensors filled with a number, and index ramps; and operands as tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from meshdsl.ops.literal import literal
from meshdsl.ops.operation import operation
from meshdsl.tensors.dims import Dimension, DimsLike, Shape, as_list
from meshdsl.tensors.dtypes import as_dtype, is_complex, is_float, is_integer
from meshdsl.tensors.named_array import NamedArray
from meshdsl.tensors.tensor import Tensor
from meshdsl.tracing.graph import Aval, Form, Primitive, TracedTensor, Work
from meshdsl.tracing.trace import bind_one, current


def _rule(inputs: Sequence[Tensor], params: Mapping[str, Any]) -> list[Aval]:
    return [(params["shape"], params["dtype"])]


FULL = Primitive("full", _rule, work=Work.NONE, form=Form.GENERATED)
ARANGE = Primitive("arange", _rule, work=Work.NONE, form=Form.GENERATED)


def sized(dims: DimsLike) -> Shape:
    """Returns dims as a shape; a bare name is an error, since it has no size."""
    listed = as_list(dims)
    bare = [dim for dim in listed if not isinstance(dim, Dimension)]
    if bare:
        raise ValueError(f"{', '.join(map(repr, bare))} has no size here; give a md.Dimension")
    return Shape(dim for dim in listed if isinstance(dim, Dimension))


def _check_range(number: complex | bool, dtype: np.dtype) -> None:
    """Raises ValueError where an integer or real dtype does not hold the number."""
    if isinstance(number, complex):
        if not is_complex(dtype):
            raise ValueError(
                f"the complex number {number} meets {dtype.name}; cast the tensor first, as in "
                "md.cast(x, 'complex64')"
            )
        return
    if is_integer(dtype):
        limits = np.iinfo(dtype)
        if not limits.min <= number <= limits.max or number != int(number):
            raise ValueError(
                f"{dtype.name} holds whole numbers from {limits.min} to {limits.max}, not {number}"
            )


@operation
def full(dims: DimsLike, value: complex | bool, dtype: Any = "float32") -> Tensor:
    """Returns a tensor filled with one number. `md.full([batch, length], 0.5)`.

    Raises:
        ValueError: a dim has a name only, or the dtype does not hold the number.

    Examples:
        >>> print(md.full(md.dims(batch=2, length=3), 0.5))
        f32[batch=2, length=3] [[0.5 0.5 0.5]
         [0.5 0.5 0.5]]
    """
    dtype = as_dtype(dtype)
    value = value.item() if isinstance(value, np.generic) else value
    _check_range(value, dtype)
    return bind_one(FULL, (), {"value": value, "shape": sized(dims), "dtype": dtype})


def zeros(dims: DimsLike, dtype: Any = "float32") -> Tensor:
    """Returns a tensor of zeros. `md.zeros([batch, length])`.

    Raises:
        ValueError: a dim has a name only, or the dtype is unknown.

    Examples:
        >>> print(md.zeros(md.dims(batch=2, length=3)))
        f32[batch=2, length=3] [[0. 0. 0.]
         [0. 0. 0.]]
    """
    return full(dims, 0, dtype)


def ones(dims: DimsLike, dtype: Any = "float32") -> Tensor:
    """Returns a tensor of ones. `md.ones([batch, length])`.

    Raises:
        ValueError: a dim has a name only, or the dtype is unknown.

    Examples:
        >>> print(md.ones(md.dims(batch=2, length=3), "int32"))
        s32[batch=2, length=3] [[1 1 1]
         [1 1 1]]
    """
    return full(dims, 1, dtype)


@operation
def arange(dim: Dimension, dtype: Any = "int32") -> Tensor:
    """Returns 0, 1, ... along `dim`. `md.arange(length)`.

    Raises:
        ValueError: `dim` has a name only, or the dtype does not hold its last position.

    Examples:
        >>> print(md.arange(md.Dimension("length", 4)))
        s32[length=4] [0 1 2 3]
    """
    dtype = as_dtype(dtype)
    shape = sized(dim)
    _check_range(shape.volume - 1, dtype)
    return bind_one(ARANGE, (), {"shape": shape, "dtype": dtype})


def as_tensor(value: Any, like: np.dtype | None = None) -> Tensor:
    """Returns an operand as a tensor.

    A Python number takes the dtype `like`; a NamedArray becomes a literal.

    Raises:
        ValueError: a fractional number meets an integer tensor, a bool meets numbers, or the
            operand is of another type.
    """
    if isinstance(value, TracedTensor):
        return value
    if isinstance(value, NamedArray):
        return literal(value)
    if type(value) not in (float, int) or not value:  # 0.0 equals -0.0
        return _constant(value, like)
    # An optimizer multiplies each of thousands of parameters by the same few numbers.
    numbers, key = current().numbers, (type(value), value, like)
    if key not in numbers:
        numbers[key] = _constant(value, like)
    return numbers[key]


def _constant(value: Any, like: np.dtype | None) -> Tensor:
    """Returns a number as a tensor; see `as_tensor`."""
    if isinstance(value, bool | int | float | complex | np.bool_ | np.number):
        number = value.item() if isinstance(value, np.generic) else value
        if like is None:
            like = np.dtype(
                "bool"
                if isinstance(number, bool)
                else "int32"
                if isinstance(number, int)
                else "complex64"
                if isinstance(number, complex)
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
        _check_range(number, like)
        if is_float(like):
            number = float(number)  # type: ignore[arg-type]
        return bind_one(FULL, (), {"value": number, "shape": Shape(), "dtype": like})
    raise ValueError(
        f"{type(value).__name__} is not an operand; use a tensor, a Python number, or "
        "md.named(array, dims)"
    )
