"""The functions that shared emitters use, for numpy's arrays with a row for each device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy import broadcast_to, concat, full, permute_dims, reshape

from meshdsl.tensors.dtypes import accumulator

__all__ = ["arange", "asarray", "astype", "broadcast_to", "concat", "einsum", "full", "wide"]
__all__ += ["LEAD", "numbers", "permute_dims", "reshape"]

LEAD = 1


def arange(size: int) -> np.ndarray:
    return np.arange(size, dtype=np.int32)


def asarray(value: Any, dtype: np.dtype) -> np.ndarray:
    return np.asarray(value).astype(dtype)


def astype(x: Any, dtype: np.dtype) -> np.ndarray:
    return np.asarray(x).astype(dtype, copy=False)


def einsum(equation: str, factors: Sequence[np.ndarray], dtype: np.dtype) -> np.ndarray:
    wider = wide_factors(factors, dtype)
    return np.einsum(equation, *wider, optimize=len(factors) > 1).astype(dtype)


def wide_factors(factors: Sequence[np.ndarray], dtype: np.dtype) -> list[np.ndarray]:
    """Returns the factors of a product of `dtype` in a dtype that sums are accurate in."""
    # Half precision is summed in float32, and rounded once. Sums of products of 8 bits, which may
    # be wider than their factors, are exact in float64.
    exact = all(x.itemsize == 1 for x in factors) and dtype.itemsize > 1
    return [x.astype(np.float64) if exact else wide(x) for x in factors]


def numbers(x: np.ndarray, dtype: np.dtype) -> np.ndarray:
    return x


def wide(x: np.ndarray) -> np.ndarray:
    """Returns x in a dtype that SciPy supports and that sums are accurate in."""
    return x.astype(accumulator(x.dtype), copy=False)
