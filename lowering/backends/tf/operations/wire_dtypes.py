"""Numbers as the few dtypes that collectives between hosts take, and back.

`as_words` is for what is only moved, `as_keys` for what is reduced: the sums or extremes of keys
are the keys of those of the numbers. Extremes of floats are those of integers that order like them,
with NaN before all, which a reduction between devices might drop.
"""

from __future__ import annotations

import tensorflow as tf

_SAME_SIZE = {tf.uint32: tf.int32, tf.uint64: tf.int64}
_PARTS = {tf.complex64: tf.float32, tf.complex128: tf.float64}


def as_words(x: tf.Tensor, taken: tuple[str, ...]) -> tf.Tensor:
    """Returns numbers in one of the dtypes `taken`: [..., 2] of complex ones."""
    if x.dtype.name in taken:
        return x
    if x.dtype in _SAME_SIZE:
        return tf.bitcast(x, _SAME_SIZE[x.dtype])
    if x.dtype in _PARTS:
        return tf.stack([tf.math.real(x), tf.math.imag(x)], -1)
    return tf.cast(x, tf.float32 if x.dtype.is_floating else tf.int32)


def of_words(words: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """Returns the numbers that `as_words` made words of."""
    if words.dtype == dtype:
        return words
    if dtype in _SAME_SIZE:
        return tf.bitcast(words, dtype)
    if dtype in _PARTS:
        return tf.complex(words[..., 0], words[..., 1])
    return tf.cast(words, dtype)


def as_keys(x: tf.Tensor, kind: str, taken: tuple[str, ...]) -> tf.Tensor:
    """Returns numbers that can be reduced: to a sum, max or min."""
    if kind == "sum" or not (x.dtype.is_floating or x.dtype.is_unsigned):
        return as_words(x, taken)
    if x.dtype.is_unsigned:
        return as_words(x, taken) if x.dtype.size < 4 else _upper_half(as_words(x, taken))
    words = tf.bitcast(x, tf.dtypes.as_dtype(f"int{8 * x.dtype.size}"))
    key = _flip(words)
    never = key.dtype.max if kind == "max" else key.dtype.min
    key = tf.where(tf.math.is_nan(x), tf.constant(never, key.dtype), key)
    return as_words(key, taken)


def of_keys(keys: tf.Tensor, kind: str, dtype: tf.DType) -> tf.Tensor:
    """Returns the numbers that `as_keys` made keys of."""
    if kind == "sum" or not (dtype.is_floating or dtype.is_unsigned):
        return of_words(keys, dtype)
    if dtype.is_unsigned:
        return of_words(keys if dtype.size < 4 else _upper_half(keys), dtype)
    words = of_words(keys, tf.dtypes.as_dtype(f"int{8 * dtype.size}"))
    return tf.bitcast(_flip(words), dtype)


def reduced(rows: tf.Tensor, kind: str) -> tf.Tensor:
    """Returns the sum, max or min of rows that a device has received.

    Half precision is summed in float32. Bools count as 0 and 1; of summands one at most is true.
    """
    if rows.dtype == tf.bool:
        return (tf.reduce_all if kind == "min" else tf.reduce_any)(rows, 0)
    if kind != "sum":
        return (tf.reduce_max if kind == "max" else tf.reduce_min)(rows, 0)
    half = rows.dtype.is_floating and rows.dtype.size < 4
    return tf.cast(tf.reduce_sum(tf.cast(rows, tf.float32) if half else rows, 0), rows.dtype)


def _flip(bits: tf.Tensor) -> tf.Tensor:
    """Turns the bits of floats into integers that order like them, and back."""
    sign = tf.bitwise.right_shift(bits, tf.constant(8 * bits.dtype.size - 1, bits.dtype))
    return tf.bitwise.bitwise_xor(bits, tf.bitwise.bitwise_and(sign, bits.dtype.max))


def _upper_half(bits: tf.Tensor) -> tf.Tensor:
    """Turns unsigned integers into signed ones that order like them, and back."""
    return tf.bitwise.bitwise_xor(bits, tf.constant(bits.dtype.min, bits.dtype))
