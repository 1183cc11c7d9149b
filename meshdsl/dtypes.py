"""Element types: numpy dtypes (with ml_dtypes' bfloat16), their short names and classes."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
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
    "float16": "f16",
    "bfloat16": "bf16",
    "float32": "f32",
    "float64": "f64",
}


def as_dtype(dtype: Any) -> np.dtype:
    """Returns the numpy dtype meant by a name, a scalar type or a dtype.

    Raises:
        ValueError: the language has no such type; the known ones are listed.
    """
    try:
        found = BFLOAT16 if dtype == "bfloat16" else None if dtype is None else np.dtype(dtype)
    except TypeError:
        found = None
    if found is None or found.name not in _SHORT:
        raise ValueError(f"unknown dtype {dtype!r}; choose one of {', '.join(_SHORT)}")
    return found


def short(dtype: np.dtype) -> str:
    """Returns the field's short name: f32, bf16, s32, ..."""
    return _SHORT[dtype.name]


def is_float(dtype: np.dtype) -> bool:
    """Whether a dtype is floating-point, bfloat16 included."""
    return dtype.kind == "f" or dtype == BFLOAT16


def rounding(dtype: np.dtype) -> float:
    """Returns by how much, relatively, two ways to compute one number may differ: a few units."""
    units = 16 if dtype.itemsize >= 4 else 1
    return units * float(ml_dtypes.finfo(dtype).eps)


def is_integer(dtype: np.dtype) -> bool:
    """Whether a dtype is a signed or unsigned integer."""
    return dtype.kind in "iu"
