"""The functions that shared emitters use, for TensorFlow's tensors on one device.

TensorFlow does not follow the array API. Operations without effect are left out here: XLA would
remove them, but a host would copy the tensor. Only `broadcast_to` is always emitted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow import abs, broadcast_to, concat, exp, maximum, reshape, split, tanh
from tensorflow import reduce_max as max
from tensorflow import reduce_min as min
from tensorflow import reduce_sum as sum
from tensorflow.math import log

from meshdsl.lowering.backends.tf.operations.float8 import to_numbers
from meshdsl.tensors.dtypes import is_float8

__all__ = ["LEAD", "abs", "arange", "as_factor", "asarray", "astype", "broadcast_to", "clip"]
__all__ += ["numbers"]
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
__all__ += ["split", "sum", "tanh", "tf_dtype", "update_axis", "where"]

LEAD = 0


def tf_dtype(dtype: np.dtype) -> tf.DType:
    """Returns TensorFlow's dtype for one of numpy.

    Floats of 8 bits are kept as their bits (`operations.float8`).
    """
    return tf.uint8 if is_float8(dtype) else tf.dtypes.as_dtype(dtype.name)


def numbers(x: tf.Tensor, dtype: np.dtype) -> tf.Tensor:
    return to_numbers(x, dtype) if is_float8(dtype) else x


def as_factor(x: tf.Tensor, like: tf.Tensor) -> tf.Tensor:
    return x  # `einsum` below would widen it again


def arange(size: int) -> tf.Tensor:
    return tf.range(size, dtype=tf.int32)


def asarray(value: Any, dtype: np.dtype) -> tf.Tensor:
    array = np.asarray(value).astype(dtype)
    return tf.constant(array.view(np.uint8) if is_float8(dtype) else array)


def astype(x: tf.Tensor, dtype: np.dtype) -> tf.Tensor:
    return x if x.dtype == tf_dtype(dtype) else tf.cast(x, dtype)


def clip(x: tf.Tensor, least: int, most: int) -> tf.Tensor:
    return tf.clip_by_value(x, least, most)


def einsum(equation: str, factors: Sequence[tf.Tensor], dtype: np.dtype) -> tf.Tensor:
    # TensorFlow has no product in a wider dtype than the factors', so these are cast.
    small = factors[0].dtype == tf.int8 and dtype.itemsize > 1
    sums = np.dtype("int32") if small else dtype
    widened = (tf.cast(x, sums) for x in factors)
    return astype(tf.einsum(equation, *widened, optimize="optimal"), dtype)


def full(sizes: Sequence[int], value: Any, dtype: np.dtype) -> tf.Tensor:
    return tf.broadcast_to(asarray(value, dtype), sizes)


def moveaxis(x: tf.Tensor, source: int, target: int) -> tf.Tensor:
    order = list(range(len(x.shape)))
    count = len(order)
    order.insert(target % count, order.pop(source % count))
    return x if order == list(range(count)) else tf.transpose(x, order)


def permute_dims(x: tf.Tensor, order: Sequence[int]) -> tf.Tensor:
    return tf.transpose(x, order)


def where(condition: tf.Tensor, x: Any, y: Any) -> tf.Tensor:
    if not tf.is_tensor(x):
        x = tf.constant(x, y.dtype)
    elif not tf.is_tensor(y):
        y = tf.constant(y, x.dtype)
    return tf.where(condition, x, y)


def entry(table: Sequence[int], index: tf.Tensor) -> tf.Tensor:
    return tf.gather(tf.constant(list(table), tf.int32), index)


def difference(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    if x.dtype != y.dtype:
        x, y = tf.cast(x, tf.int64), tf.cast(y, tf.int64)
    return x - y


def pad(x: tf.Tensor, widths: Sequence[tuple[int, int]], fill: float | None = None) -> tf.Tensor:
    return tf.pad(x, widths, constant_values=0 if fill is None else tf.cast(fill, x.dtype))


def pad_axis(x: tf.Tensor, at: int, before: int, after: int, fill: Any) -> tf.Tensor:
    size, first, last = x.shape[at], -before * (before < 0), -after * (after < 0)
    fill = fill if tf.is_tensor(fill) else asarray(fill, x.dtype.as_numpy_dtype)
    if first + last >= size:  # no element of x remains
        sizes = x.shape.as_list()
        sizes[at] = size + before + after
        return tf.broadcast_to(fill, sizes)
    x = slice_axis(x, first, size - first - last, at)
    if before <= 0 and after <= 0:
        return x
    pads = [(0, 0)] * len(x.shape)
    pads[at] = (first + before, last + after)
    return tf.pad(x, pads, constant_values=fill)


def slice_axis(x: tf.Tensor, start: Any, size: int, at: int) -> tf.Tensor:
    sizes = x.shape.as_list()
    if sizes[at] == size:
        return x
    starts = [0] * len(sizes)
    starts[at], sizes[at] = start, size
    return tf.slice(x, starts if isinstance(start, int) else tf.stack(starts), sizes)


def update_axis(x: tf.Tensor, piece: tf.Tensor, start: Any, at: int) -> tf.Tensor:
    if x.shape == piece.shape:
        return piece
    size, length = piece.shape[at], x.shape[at]
    index = tf.range(length, dtype=tf.int32) - start
    inside = (index >= 0) & (index < size)
    column = [1] * len(x.shape)
    column[at] = length
    spread = tf.gather(piece, tf.clip_by_value(index, 0, size - 1), axis=at)
    return tf.where(tf.reshape(inside, column), spread, x)


def put_axis(x: tf.Tensor, piece: tf.Tensor, places: tf.Tensor, at: int) -> tf.Tensor:
    length = x.shape[at]
    here = tf.range(length, dtype=tf.int32)[:, None] == places[None]
    column = [1] * len(x.shape)
    column[at] = length
    spread = tf.gather(piece, tf.argmax(tf.cast(here, tf.int32), axis=1), axis=at)
    return tf.where(tf.reshape(tf.reduce_any(here, axis=1), column), spread, x)
