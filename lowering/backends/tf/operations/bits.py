"""Bit operations, elementwise."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf


def _population_count(x: tf.Tensor) -> tf.Tensor:
    """Adds neighbouring bits, then neighbouring pairs of bits, and so on (Warren 2012, 5-1)."""
    width = 8 * x.dtype.size
    bits = x if x.dtype.is_unsigned else tf.bitcast(x, tf.dtypes.as_dtype(f"uint{width}"))
    if width < 32:
        bits, width = tf.cast(bits, tf.uint32), 32
    shift = 1
    while shift < width:
        low = int(np.sum([1 << i for i in range(width) if (i // shift) % 2 == 0], dtype=object))
        mask = tf.constant(low, bits.dtype)
        upper = tf.bitwise.right_shift(bits, tf.constant(shift, bits.dtype))
        bits = tf.bitwise.bitwise_and(bits, mask) + tf.bitwise.bitwise_and(upper, mask)
        shift *= 2
    return tf.cast(bits, x.dtype)


def _shift(compute: Callable[..., tf.Tensor]) -> Callable[..., tf.Tensor]:
    """Returns a shift that also accepts counts of all bits or more, which drop all bits."""

    def shifted(x: tf.Tensor, by: tf.Tensor) -> tf.Tensor:
        right = compute is tf.bitwise.right_shift
        width = tf.constant(8 * x.dtype.size, by.dtype)
        exceeds = by >= width
        result = compute(x, tf.where(exceeds, tf.zeros_like(by), by))
        rest = tf.zeros_like(x)
        if right and not x.dtype.is_unsigned:
            rest = tf.where(x < 0, tf.ones_like(x) * -1, tf.zeros_like(x))
        return tf.where(exceeds, rest, result)

    return shifted


def _on_bools_or_bits(
    on_bools: Callable[..., Any], on_bits: Callable[..., Any]
) -> Callable[..., Any]:
    """Returns a function that selects one of two by the dtype of its inputs."""

    def compute(*inputs: tf.Tensor) -> tf.Tensor:
        return (on_bools if inputs[0].dtype == tf.bool else on_bits)(*inputs)

    return compute


FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "bit_and": _on_bools_or_bits(tf.logical_and, tf.bitwise.bitwise_and),
    "bit_not": _on_bools_or_bits(tf.logical_not, tf.bitwise.invert),
    "bit_or": _on_bools_or_bits(tf.logical_or, tf.bitwise.bitwise_or),
    "bit_xor": _on_bools_or_bits(tf.math.logical_xor, tf.bitwise.bitwise_xor),
    "population_count": _population_count,
    "shift_left": _shift(tf.bitwise.left_shift),
    "shift_right": _shift(tf.bitwise.right_shift),
}
