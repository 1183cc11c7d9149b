"""Element types: numpy dtypes (with those of ml_dtypes), their short names and classes.

Floats of 8 bits are for products and for sending: they are cast, moved and multiplied in einsums,
and no other arithmetic takes them. So they are a kind of their own, apart from floating-point ones.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import ml_dtypes
import numpy as np

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FLOAT8_E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
FLOAT8_E5M2 = np.dtype(ml_dtypes.float8_e5m2)
_BY_NAME = {dtype.name: dtype for dtype in (BFLOAT16, FLOAT8_E4M3, FLOAT8_E5M2)}
_SHORT = {
    "bool": "bool",
    "int8": "s8",
    "int16": "s16",
    "int32": "s32",
    "int64": "s64",
    "uint8": "u8",
    "uint16": "u16",
    "uint32": "u32",
    "uint64": "u64",
    "float8_e4m3fn": "f8e4m3fn",
    "float8_e5m2": "f8e5m2",
    "float16": "f16",
    "bfloat16": "bf16",
    "float32": "f32",
    "float64": "f64",
    "complex64": "c64",
    "complex128": "c128",
}
_KINDS = {"b": "bool", "i": "integer", "f": "floating-point", "c": "complex", "e": "8-bit float"}


def as_dtype(dtype: Any) -> np.dtype:
    """Returns the numpy dtype for a name, a scalar type or a dtype.

    Raises:
        ValueError: the language has no such type; the known ones are listed.
    """
    try:
        known = _BY_NAME.get(dtype) if isinstance(dtype, str) else None
        result = known or (None if dtype is None else np.dtype(dtype))
    except TypeError:
        result = None
    if result is None or result.name not in _SHORT:
        near = next((name for name, brief in _SHORT.items() if brief == dtype), None)
        hint = f". Did you mean `{near}`?" if near else ""
        raise ValueError(f"unknown dtype {dtype!r}; choose one of {', '.join(_SHORT)}{hint}")
    return result


def short(dtype: np.dtype) -> str:
    """Returns the field's short name: f32, bf16, s32, ..."""
    return _SHORT[dtype.name]


def is_float(dtype: np.dtype) -> bool:
    """Whether a dtype is floating-point, bfloat16 included, floats of 8 bits not."""
    # ml_dtypes calls float8_e5m2 floating-point, and bfloat16 not.
    return (dtype.kind == "f" and dtype.itemsize > 1) or dtype == BFLOAT16


def is_float8(dtype: np.dtype) -> bool:
    """Whether a dtype is a float of 8 bits."""
    return dtype in (FLOAT8_E4M3, FLOAT8_E5M2)


def is_complex(dtype: np.dtype) -> bool:
    """Whether a dtype is complex."""
    return dtype.kind == "c"


def is_differentiable(dtype: np.dtype) -> bool:
    """Whether numbers of a dtype vary smoothly: floating-point and complex ones."""
    return is_float(dtype) or is_complex(dtype)


def real_dtype(dtype: np.dtype) -> np.dtype:
    """Returns the dtype of a number's real part: float32 for complex64, itself for others."""
    return np.dtype(f"float{4 * dtype.itemsize}") if is_complex(dtype) else dtype


def complex_dtype(dtype: np.dtype) -> np.dtype:
    """Returns the complex dtype whose parts have a dtype: complex64 for float32.

    Raises:
        ValueError: there is none.
    """
    if dtype.name not in ("float32", "float64"):
        raise ValueError(
            f"no complex dtype has parts of {dtype.name}; cast to float32 or float64 first"
        )
    return np.dtype(f"complex{16 * dtype.itemsize}")


@cache
def kind(dtype: np.dtype) -> str:
    """Returns the letter of a dtype's kind: b(ool), i(nteger), f(loating-point), c(omplex) or
    e(ight-bit float)."""
    if is_float(dtype):
        return "f"
    if is_float8(dtype):
        return "e"
    return "i" if is_integer(dtype) else dtype.kind


def in_words(kinds: str) -> str:
    """Returns kinds of dtypes, given by their letters, as text: "floating-point or complex"."""
    *most, last = [_KINDS[letter] for letter in kinds]
    return f"{', '.join(most)} or {last}" if most else last


def need_kind(dtype: np.dtype, kinds: str, what: str = "tensors") -> None:
    """Raises ValueError unless a dtype is of one of the kinds, by their letters."""
    if kind(dtype) not in kinds:
        hint = "; cast it first, as in md.cast(x, 'bfloat16')" if is_float8(dtype) else ""
        raise ValueError(f"needs {in_words(kinds)} {what}, got {short(dtype)}{hint}")


def largest(dtype: np.dtype) -> float:
    """Returns the largest finite number of a floating-point dtype, also of one of 8 bits."""
    return float(ml_dtypes.finfo(dtype).max)


def holds(wide: np.dtype, narrow: np.dtype) -> bool:
    """Whether one floating-point dtype holds every number of another; False of other dtypes."""
    if not (is_float(wide) and is_float(narrow)):
        return False
    w, n = ml_dtypes.finfo(wide), ml_dtypes.finfo(narrow)
    return w.nmant >= n.nmant and w.maxexp >= n.maxexp and w.minexp <= n.minexp


def rounding(dtype: np.dtype) -> float:
    """Returns the relative difference that two ways to compute one number may have: a few units."""
    units = 16 if dtype.itemsize >= 4 else 1
    return units * float(ml_dtypes.finfo(dtype).eps)


def is_integer(dtype: np.dtype) -> bool:
    """Whether a dtype is a signed or unsigned integer."""
    return dtype.kind in "iu"


def identity(kind: str, dtype: np.dtype) -> float:
    """Returns the neutral number of a sum, prod(uct), max or min of numbers of a dtype."""
    if kind in ("sum", "prod"):
        return 0 if kind == "sum" else 1
    if is_float(dtype):
        return -np.inf if kind == "max" else np.inf
    limits = np.iinfo(dtype)
    return int(limits.min if kind == "max" else limits.max)


def accumulator(dtype: np.dtype) -> np.dtype:
    """Returns the dtype in which sums are accumulated: float32 for floats of 8 and 16 bits."""
    is_narrow = is_float8(dtype) or (is_float(dtype) and dtype.itemsize < 4)
    return np.dtype("float32") if is_narrow else dtype
