"""Numbers as a mantissa and an exponent, so that products leave no range.

A mantissa is 0, infinite, NaN, or has a magnitude in [0.5, 1); that of a complex number is the
larger one of its parts'. Exponents are s32; those of 0 and of what is not finite mean nothing.
TensorFlow has no functions for this, so the bits of numbers are used.

Dtypes are float32, float64 and their complex ones: half precision is multiplied in float32. The
sum of a dim's exponents must fit in s32: 14 million factors at the limits of float32, 2 million at
those of float64.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import tensorflow as tf

from meshdsl.lowering.backends.common.arrange import permuted
from meshdsl.lowering.backends.tf import namespace as xp
from meshdsl.lowering.backends.tf.machine import Arrays, Emitter, Machine
from meshdsl.lowering.parameters import Reduction, parameters_of
from meshdsl.lowering.program import Instruction

_BLOCK = 32  # mantissas whose product, 2**-32 at least, is normal in float32 and wider
_LIFT = 64  # binary places that make every number of float32 and wider normal
_FIELDS = {tf.float32: (tf.int32, 23, 127), tf.float64: (tf.int64, 52, 1023)}


def parted(x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns mantissas and exponents."""
    if x.dtype.is_complex:
        size = tf.maximum(tf.abs(tf.math.real(x)), tf.abs(tf.math.imag(x)))
        exponent = parted(size)[1]
        return scaled(x, -exponent), exponent
    assert x.dtype in _FIELDS, "half precision is multiplied in float32"
    words, places, bias = _FIELDS[x.dtype]
    low = tf.abs(x) < 2.0 ** (1 - bias)
    lifted = tf.where(low, x * 2.0**_LIFT, x)
    bits = tf.bitcast(lifted, words)
    field = tf.bitwise.bitwise_and(
        tf.bitwise.right_shift(bits, _number(places, words)), 2 * bias + 1
    )
    moved = bits + tf.bitwise.left_shift(_number(bias - 1, words) - field, _number(places, words))
    plain = (lifted == 0) | (field == 2 * bias + 1)
    mantissa = tf.where(plain, lifted, tf.bitcast(moved, x.dtype))
    exponent = tf.cast(field - (bias - 1), tf.int32) - tf.where(low, _LIFT, 0)
    return mantissa, tf.where(plain, 0, exponent)


def scaled(x: tf.Tensor, exponent: tf.Tensor) -> tf.Tensor:
    """Returns x times 2**exponent, in three steps of which none leaves the range on its own."""
    if x.dtype.is_complex:
        return tf.complex(scaled(tf.math.real(x), exponent), scaled(tf.math.imag(x), exponent))
    words, places, bias = _FIELDS[x.dtype]
    left = tf.cast(tf.clip_by_value(exponent, -3 * (bias - 1), 3 * (bias - 1)), words)
    for steps in (3, 2, 1):
        step = left // steps
        left -= step
        factor = tf.bitwise.left_shift(step + bias, _number(places, words))
        x = x * tf.bitcast(factor, x.dtype)
    return x


def multiply(
    first: Sequence[tf.Tensor], second: Sequence[tf.Tensor]
) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the product of two (mantissa, exponent)."""
    mantissa, more = parted(first[0] * second[0])
    return mantissa, first[1] + second[1] + more


def product(mantissa: tf.Tensor, exponent: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the (mantissa, exponent) of the product of all rows."""
    rows, total = mantissa, tf.reduce_sum(exponent, 0)
    while rows.shape[0] > 1:
        block = min(_BLOCK, rows.shape[0])
        blank = tf.ones([-rows.shape[0] % block, *rows.shape[1:]], rows.dtype)
        blocks = tf.reshape(tf.concat([rows, blank], 0), [-1, block, *rows.shape[1:]])
        rows, more = parted(tf.reduce_prod(blocks, 1))
        total = total + tf.reduce_sum(more, 0)
    return rows[0], total


def in_rows(x: tf.Tensor, over: Sequence[int]) -> tf.Tensor:
    """Returns x with some axes as one in front."""
    rest = [at for at in range(len(x.shape)) if at not in over]
    return tf.reshape(permuted(xp, x, [*over, *rest]), [-1, *(x.shape[at] for at in rest)])


def _number(value: int, dtype: tf.DType) -> tf.Tensor:
    return tf.constant(value, dtype)


def _scaled_prod(
    machine: Machine, instruction: Instruction, inputs: Arrays
) -> tuple[tf.Tensor, tf.Tensor]:
    local = instruction.inputs[0].local
    over = [local.position(name) for name in parameters_of(instruction, Reduction)["over"]]
    mantissa, exponent = parted(inputs[0])
    if len(inputs) > 1:
        exponent = exponent + inputs[1]
    return product(in_rows(mantissa, over), in_rows(exponent, over))


def _scale(machine: Machine, instruction: Instruction, inputs: Arrays) -> tf.Tensor:
    return scaled(*inputs)


EMITTERS: Mapping[str, Emitter] = {"scaled_prod": _scaled_prod, "scale": _scale}
