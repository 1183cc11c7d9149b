"""Numbers as a mantissa and an exponent, so that products do not overflow or underflow.

A mantissa is 0, infinite, NaN, or has a magnitude in [0.5, 1). A complex number has one exponent,
that of the larger of its parts. Exponents are s32; those of 0, inf and NaN are arbitrary.
TensorFlow has no frexp or ldexp, so both work on the bits of numbers.

Dtypes are float32, float64, complex64 and complex128: half precision is multiplied in float32. The
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
# The dtype of the bits, the bits of the mantissa, and the bias of the exponent.
_FIELDS = {tf.float32: (tf.int32, 23, 127), tf.float64: (tf.int64, 52, 1023)}


def frexp(x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the mantissas and exponents of numbers, also of complex ones."""
    if x.dtype.is_complex:
        size = tf.maximum(tf.abs(tf.math.real(x)), tf.abs(tf.math.imag(x)))
        exponent = frexp(size)[1]
        return scaled(x, -exponent), exponent
    assert x.dtype in _FIELDS, "half precision is multiplied in float32"
    words, digits, bias = _FIELDS[x.dtype]
    is_subnormal = tf.abs(x) < 2.0 ** (1 - bias)
    lifted = tf.where(is_subnormal, x * 2.0**_LIFT, x)
    bits = tf.bitcast(lifted, words)
    field = tf.bitwise.bitwise_and(
        tf.bitwise.right_shift(bits, _number(digits, words)), 2 * bias + 1
    )
    normalized = bits + tf.bitwise.left_shift(
        _number(bias - 1, words) - field, _number(digits, words)
    )
    is_special = (lifted == 0) | (field == 2 * bias + 1)
    mantissa = tf.where(is_special, lifted, tf.bitcast(normalized, x.dtype))
    exponent = tf.cast(field - (bias - 1), tf.int32) - tf.where(is_subnormal, _LIFT, 0)
    return mantissa, tf.where(is_special, 0, exponent)


def scaled(x: tf.Tensor, exponent: tf.Tensor) -> tf.Tensor:
    """Returns x times 2**exponent, in three steps: each factor is in the range."""
    if x.dtype.is_complex:
        return tf.complex(scaled(tf.math.real(x), exponent), scaled(tf.math.imag(x), exponent))
    words, digits, bias = _FIELDS[x.dtype]
    rest = tf.cast(tf.clip_by_value(exponent, -3 * (bias - 1), 3 * (bias - 1)), words)
    for steps in (3, 2, 1):
        step = rest // steps
        rest -= step
        factor = tf.bitwise.left_shift(step + bias, _number(digits, words))
        x = x * tf.bitcast(factor, x.dtype)
    return x


def multiply(
    first: Sequence[tf.Tensor], second: Sequence[tf.Tensor]
) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the product of two numbers, each a (mantissa, exponent)."""
    mantissa, more = frexp(first[0] * second[0])
    return mantissa, first[1] + second[1] + more


def product(mantissa: tf.Tensor, exponent: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the (mantissa, exponent) of the product of all rows."""
    rows, total = mantissa, tf.reduce_sum(exponent, 0)
    while rows.shape[0] > 1:
        block = min(_BLOCK, rows.shape[0])
        blank = tf.ones([-rows.shape[0] % block, *rows.shape[1:]], rows.dtype)
        blocks = tf.reshape(tf.concat([rows, blank], 0), [-1, block, *rows.shape[1:]])
        rows, more = frexp(tf.reduce_prod(blocks, 1))
        total = total + tf.reduce_sum(more, 0)
    return rows[0], total


def in_rows(x: tf.Tensor, over: Sequence[int]) -> tf.Tensor:
    """Returns x with some axes merged into a first one."""
    rest = [at for at in range(len(x.shape)) if at not in over]
    return tf.reshape(permuted(xp, x, [*over, *rest]), [-1, *(x.shape[at] for at in rest)])


def _number(value: int, dtype: tf.DType) -> tf.Tensor:
    return tf.constant(value, dtype)


def _scaled_prod(
    machine: Machine, instruction: Instruction, inputs: Arrays
) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns products as (mantissa, exponent), from numbers or from such pairs."""
    local = instruction.inputs[0].local
    over = [local.position(name) for name in parameters_of(instruction, Reduction)["over"]]
    mantissa, exponent = frexp(inputs[0])
    if len(inputs) > 1:
        exponent = exponent + inputs[1]
    return product(in_rows(mantissa, over), in_rows(exponent, over))


def _scale(machine: Machine, instruction: Instruction, inputs: Arrays) -> tf.Tensor:
    return scaled(*inputs)


EMITTERS: Mapping[str, Emitter] = {"scaled_prod": _scaled_prod, "scale": _scale}
