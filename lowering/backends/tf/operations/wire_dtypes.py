"""Conversion of numbers to the few dtypes that collectives between hosts support, and back.

`as_words` is for data that is only moved, `as_keys` for data that is reduced: the sum, max or min
of keys is the key of that of the numbers. Extremes of floats are those of integers that order like
them, with NaN first: a reduction between devices might drop NaN.
"""

from __future__ import annotations

import tensorflow as tf

_SAME_SIZE = {tf.uint32: tf.int32, tf.uint64: tf.int64}
_PARTS = {tf.complex64: tf.float32, tf.complex128: tf.float64}


def as_words(x: tf.Tensor, supported: tuple[str, ...]) -> tf.Tensor:
    """Returns numbers in one of the dtypes `supported`; complex ones as [..., 2]."""
    if x.dtype.name in supported:
        return x
    if x.dtype in _SAME_SIZE:
        return tf.bitcast(x, _SAME_SIZE[x.dtype])
    if x.dtype in _PARTS:
        return tf.stack([tf.math.real(x), tf.math.imag(x)], -1)
    return tf.cast(x, tf.float32 if x.dtype.is_floating else tf.int32)


def from_words(words: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """Returns numbers, from words; the inverse of `as_words`."""
    if words.dtype == dtype:
        return words
    if dtype in _SAME_SIZE:
        return tf.bitcast(words, dtype)
    if dtype in _PARTS:
        return tf.complex(words[..., 0], words[..., 1])
    return tf.cast(words, dtype)


def as_keys(x: tf.Tensor, kind: str, supported: tuple[str, ...]) -> tf.Tensor:
    """Returns keys that a collective can reduce to a sum, max or min."""
    if kind == "sum" or not (x.dtype.is_floating or x.dtype.is_unsigned):
        return as_words(x, supported)
    if x.dtype.is_unsigned:
        return as_words(x, supported) if x.dtype.size < 4 else _flip_sign(as_words(x, supported))
    words = tf.bitcast(x, tf.dtypes.as_dtype(f"int{8 * x.dtype.size}"))
    key = _flip(words)
    nan_key = key.dtype.max if kind == "max" else key.dtype.min
    key = tf.where(tf.math.is_nan(x), tf.constant(nan_key, key.dtype), key)
    return as_words(key, supported)


def from_keys(keys: tf.Tensor, kind: str, dtype: tf.DType) -> tf.Tensor:
    """Returns numbers, from keys; the inverse of `as_keys`."""
    if kind == "sum" or not (dtype.is_floating or dtype.is_unsigned):
        return from_words(keys, dtype)
    if dtype.is_unsigned:
        return from_words(keys if dtype.size < 4 else _flip_sign(keys), dtype)
    words = from_words(keys, tf.dtypes.as_dtype(f"int{8 * dtype.size}"))
    return tf.bitcast(_flip(words), dtype)


def reduced(rows: tf.Tensor, kind: str) -> tf.Tensor:
    """Returns the sum, max or min of received rows.

    Half precision is summed in float32. For a sum of bools, at most one row is true.
    """
    if rows.dtype == tf.bool:
        return (tf.reduce_all if kind == "min" else tf.reduce_any)(rows, 0)
    if kind != "sum":
        return (tf.reduce_max if kind == "max" else tf.reduce_min)(rows, 0)
    half = rows.dtype.is_floating and rows.dtype.size < 4
    return tf.cast(tf.reduce_sum(tf.cast(rows, tf.float32) if half else rows, 0), rows.dtype)


def _flip(bits: tf.Tensor) -> tf.Tensor:
    """Converts the bits of floats to integers that order like them, and back."""
    sign = tf.bitwise.right_shift(bits, tf.constant(8 * bits.dtype.size - 1, bits.dtype))
    return tf.bitwise.bitwise_xor(bits, tf.bitwise.bitwise_and(sign, bits.dtype.max))


def _flip_sign(bits: tf.Tensor) -> tf.Tensor:
    """Converts unsigned integers to signed ones that order like them, and back."""
    return tf.bitwise.bitwise_xor(bits, tf.constant(bits.dtype.min, bits.dtype))
