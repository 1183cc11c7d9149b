"""The functions that shared emitters use, for JAX's arrays on one device.

Constants are numpy arrays: JAX would copy each one to a device while it traces.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.numpy import (
    abs,
    broadcast_to,
    clip,
    exp,
    log,
    max,
    maximum,
    min,
    moveaxis,
    sum,
    tanh,
    where,
)
from jax.numpy import subtract as difference

__all__ = ["LEAD", "abs", "arange", "as_factor", "asarray", "astype", "broadcast_to", "clip"]
__all__ += ["concat", "difference", "einsum", "entry", "exp", "full", "log", "max", "maximum"]
__all__ += [
    "min",
    "moveaxis",
    "pad",
    "pad_axis",
    "permute_dims",
    "put_axis",
    "reshape",
    "slice_axis",
]
__all__ += ["numbers", "split", "sum", "tanh", "update_axis", "where"]

LEAD = 0


def as_factor(x: Any, like: Any) -> Any:
    return x.astype(like.dtype)


def arange(size: int) -> Any:
    return lax.iota(np.int32, size)


def asarray(value: Any, dtype: np.dtype) -> np.ndarray:
    return np.asarray(value).astype(dtype, copy=False)


def astype(x: Any, dtype: np.dtype) -> Any:
    return x if x.dtype == dtype else x.astype(dtype)


def concat(arrays: Sequence[Any], at: int) -> Any:
    return jnp.concatenate(arrays, at)


def einsum(equation: str, factors: Sequence[Any], dtype: np.dtype) -> Any:
    wider = None if factors[0].dtype == dtype else dtype
    if factors[0].dtype == np.int8 and dtype.kind != "i":  # devices add up integers
        return jnp.einsum(equation, *factors, preferred_element_type=np.int32).astype(dtype)
    return jnp.einsum(equation, *factors, preferred_element_type=wider)


def full(sizes: Sequence[int], value: Any, dtype: np.dtype) -> Any:
    return lax.full(sizes, asarray(value, dtype), dtype)


def numbers(x: Any, dtype: np.dtype) -> Any:
    return x


def permute_dims(x: Any, order: Sequence[int]) -> Any:
    return x.transpose(order)  # the method works on numpy constants without JAX


def reshape(x: Any, sizes: Sequence[int]) -> Any:
    return x.reshape(sizes)


def entry(table: Sequence[int], index: Any) -> Any:
    return jnp.asarray(table, jnp.int32)[index]


def pad(x: Any, widths: Sequence[tuple[int, int]], fill: float = 0) -> Any:
    return jnp.pad(x, widths, constant_values=fill)


def pad_axis(x: Any, at: int, before: int, after: int, fill: Any) -> Any:
    pads = [(0, 0, 0)] * x.ndim
    pads[at] = (before, after, 0)
    return lax.pad(x, asarray(fill, x.dtype), pads) if any(pads[at]) else x


def slice_axis(x: Any, start: Any, size: int, at: int) -> Any:
    if isinstance(start, int):
        return lax.slice_in_dim(x, start, start + size, axis=at)
    return lax.dynamic_slice_in_dim(x, start, size, at)


def split(x: Any, sizes: Sequence[int], at: int) -> Iterator[Any]:
    stops = [0, *itertools.accumulate(sizes)]
    return (lax.slice_in_dim(x, *bounds, axis=at) for bounds in itertools.pairwise(stops))


def update_axis(x: Any, piece: Any, start: Any, at: int) -> Any:
    return lax.dynamic_update_slice_in_dim(x, piece, start, at)


def put_axis(x: Any, piece: Any, places: Any, at: int) -> Any:
    places = inside_or_past(places, x.shape[at])
    index = (*[slice(None)] * at, places)
    return x.at[index].set(piece, mode="drop", unique_indices=True)


def inside_or_past(places: Any, size: int) -> Any:
    """Returns places, [number], with those outside of [0, size) past its end; all differ."""
    inside = (places >= 0) & (places < size)  # a negative place would count from the end
    return jnp.where(inside, places, size + jnp.arange(len(places), dtype=places.dtype))
