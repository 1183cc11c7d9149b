"""Floats of 8 bits as uint8: their bits, from numbers, and the numbers, from bits.

TensorFlow rounds numbers to floats of 8 bits, but it can neither reinterpret nor pad nor select
these. So tensors keep the bits.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import tensorflow as tf


def to_bits(x: tf.Tensor, dtype: np.dtype) -> tf.Tensor:
    """Returns the bits of numbers that are rounded to a float of 8 bits."""
    limits = ml_dtypes.finfo(dtype)
    narrow = tf.cast(tf.cast(x, tf.float32), tf.dtypes.as_dtype(dtype.name))
    rounded = tf.cast(narrow, tf.float32)
    size = tf.abs(rounded)
    words = tf.bitcast(size, tf.int32)
    normal = tf.bitwise.right_shift(words, 23 - limits.nmant) - (_shift(limits) << limits.nmant)
    small = size < float(limits.smallest_normal)
    bits = tf.where(small, tf.cast(size / _step(limits), tf.int32), normal)
    infinity = 127 if np.isnan(np.asarray(np.inf).astype(dtype)) else 31 << limits.nmant
    bits = tf.where(tf.math.is_inf(size), infinity, bits)
    bits = tf.where(tf.math.is_nan(size), 127, bits)
    sign = tf.where(tf.bitcast(rounded, tf.int32) < 0, 128, 0)
    return tf.cast(bits + sign, tf.uint8)


def to_numbers(bits: tf.Tensor, dtype: np.dtype) -> tf.Tensor:
    """Returns numbers in float32, from the bits of floats of 8 bits."""
    limits = ml_dtypes.finfo(dtype)
    words = tf.cast(bits, tf.int32)
    size = tf.bitwise.bitwise_and(words, 127)
    normal = tf.bitcast(
        tf.bitwise.left_shift(size + (_shift(limits) << limits.nmant), 23 - limits.nmant),
        tf.float32,
    )
    small = size < 1 << limits.nmant
    x = tf.where(small, tf.cast(size, tf.float32) * _step(limits), normal)
    codes = np.arange(128, dtype=np.uint8).view(dtype).astype(np.float32)
    for code in np.flatnonzero(~np.isfinite(codes)):
        x = tf.where(size == int(code), tf.constant(codes[code]), x)
    return tf.where(words > 127, -x, x)


def _shift(limits: ml_dtypes.finfo) -> int:
    """Returns how far the exponents of float32 are from those of a float of 8 bits."""
    return 127 + int(limits.minexp) - 1


def _step(limits: ml_dtypes.finfo) -> float:
    """Returns the distance of the numbers next to 0."""
    return float(limits.smallest_subnormal)
