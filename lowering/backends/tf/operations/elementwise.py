"""Elementwise instructions: TensorFlow's functions; the table has those that differ.

TensorFlow lacks some functions for some dtypes. Half precision is computed in float32 and rounded.
Small and unsigned integers are computed in 64 bits; the cast back wraps as their own arithmetic
would.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from meshdsl.lowering.backends.common.elementwise import elementwise, functions
from meshdsl.lowering.backends.tf.machine import Arrays, Emitter, Machine
from meshdsl.lowering.backends.tf.namespace import numbers, tf_dtype
from meshdsl.lowering.backends.tf.operations import bits, special
from meshdsl.lowering.backends.tf.operations.float8 import to_bits
from meshdsl.lowering.program import Instruction
from meshdsl.tensors.dtypes import is_complex, is_float8, is_integer

_HALF = (tf.bfloat16, tf.float16)
_SMALL = (tf.int8, tf.int16, tf.uint8, tf.uint16, tf.uint32)


def widened(x: tf.Tensor) -> tf.Tensor:
    """Returns a tensor in a dtype that TensorFlow computes in."""
    if x.dtype in _HALF:
        return tf.cast(x, tf.float32)
    return tf.cast(x, tf.int64) if x.dtype in _SMALL else x


def wide(compute: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function for all dtypes, from one that TensorFlow has for wide dtypes only."""
    return lambda *inputs: compute(*map(widened, inputs))


def _negative(x: tf.Tensor) -> tf.Tensor:
    return tf.zeros_like(x) - x if x.dtype.is_unsigned else tf.negative(x)


def _cbrt(x: tf.Tensor) -> tf.Tensor:
    """Returns the cube root: a power, improved by a step of Newton's method."""
    size = tf.abs(x)
    # The power is wrong in the last places.
    root = tf.pow(size, tf.constant(1 / 3, x.dtype))
    safe = tf.where((root > 0) & tf.math.is_finite(root), root, tf.ones_like(root))
    improved = safe - (safe - size / (safe * safe)) / 3
    return tf.where(root == safe, improved, root) * tf.sign(x)


def _trunc(x: tf.Tensor) -> tf.Tensor:
    return tf.where(x < 0, tf.math.ceil(x), tf.math.floor(x))


def _logarithm(base: float) -> Callable[[tf.Tensor], tf.Tensor]:
    return lambda x: tf.math.log(x) / tf.constant(math.log(base), x.dtype)


def _hypot(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    """Returns sqrt(x² + y²), without overflow or underflow of the squares."""
    x, y = tf.abs(x), tf.abs(y)
    large, small = largest(x, y), least(x, y)
    is_ordinary = (large > 0) & tf.math.is_finite(large)
    # Dividing by the larger one keeps squares in the range.
    safe = tf.where(is_ordinary, large, tf.ones_like(large))
    scaled = safe * tf.sqrt(1 + tf.square(small / safe))
    infinite = tf.math.is_inf(x) | tf.math.is_inf(y)
    return tf.where(
        infinite, tf.constant(np.inf, x.dtype), tf.where(is_ordinary, scaled, large + small)
    )


def _logaddexp(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    """Returns log(exp(x) + exp(y))."""
    large, difference = largest(x, y), x - y
    distance = tf.where(
        x == y, tf.zeros_like(difference), -tf.abs(difference)
    )  # also for equal infinities
    return tf.where(tf.math.is_inf(large), large, large + tf.math.log1p(tf.exp(distance)))


def largest(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    """Returns the larger of two numbers; NaN, if one is."""
    return _extreme(tf.maximum, x, y)


def least(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    """Returns the smaller of two numbers; NaN, if one is."""
    return _extreme(tf.minimum, x, y)


def _extreme(choose: Callable[..., Any], x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    if x.dtype == tf.bool:
        return x | y if choose is tf.maximum else x & y
    result = choose(x, y)
    if not x.dtype.is_floating:
        return result
    unordered = tf.math.is_nan(x) | tf.math.is_nan(y)
    return tf.where(unordered, tf.constant(np.nan, x.dtype), result)


def _power_of_two(x: tf.Tensor) -> tf.Tensor:
    """Returns x with the bits of its exponent only."""
    signed = tf.dtypes.as_dtype(f"int{8 * x.dtype.size}")
    exponent = np.asarray(np.inf, x.dtype.as_numpy_dtype).view(signed.as_numpy_dtype)
    return tf.bitcast(tf.bitwise.bitwise_and(tf.bitcast(x, signed), exponent), x.dtype)


def _by_zero_is_zero(compute: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a division in which integers divided by 0 give 0."""

    def divide(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        if x.dtype.is_floating:
            return compute(x, y)
        is_zero = tf.equal(y, tf.zeros_like(y))
        result = compute(x, tf.where(is_zero, tf.ones_like(y), y))
        return tf.where(is_zero, tf.zeros_like(result), result)

    return divide


def _remainder(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    result = tf.math.floormod(x, y)
    if not x.dtype.is_floating:
        return result
    return tf.where(tf.math.is_inf(y) & tf.math.is_finite(x), _remainder_by_infinity(x, y), result)


def _remainder_by_infinity(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    """Returns x if it has the sign of the infinite y, else y, as numpy does."""
    return tf.where((x == 0) | (tf.sign(x) == tf.sign(y)), x + 0 * tf.sign(y), y)


def _floor_divide(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    """Returns floor(x / y), exact for floats: x less its remainder is a multiple of y."""
    if not x.dtype.is_floating:
        return tf.math.floordiv(x, y)
    exact = tf.round((x - _remainder(x, y)) / y)
    return tf.where((y == 0) | ~tf.math.is_finite(x / y), tf.math.floor(x / y), exact)


def _power(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    """Returns powers; integers to a negative power are 0."""
    if x.dtype.is_floating or x.dtype.is_complex:
        return tf.pow(x, tf.cast(y, x.dtype))
    is_negative = y < 0
    result = _integer_power(x, tf.where(is_negative, tf.zeros_like(y), y))
    return tf.where(is_negative, tf.zeros_like(result), result)


def _integer_power(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    """Returns powers by repeated squaring, one square for each bit of the exponent."""
    y = tf.cast(y, x.dtype)
    result, square, ones = tf.ones_like(x + y), x, tf.ones_like(y)
    for bit in range(8 * x.dtype.size - 1):
        odd = tf.bitwise.bitwise_and(tf.bitwise.right_shift(y, ones * bit), ones) == ones
        result = tf.where(odd, result * square, result)
        square = square * square
    return result


def cast(x: tf.Tensor, dtype: np.dtype) -> tf.Tensor:
    """Converts numbers; floats outside of an integer dtype become its limits, and NaN becomes 0."""
    target = tf_dtype(dtype)
    if x.dtype == target:
        return x
    if x.dtype.is_complex and not is_complex(dtype):
        x = tf.math.real(x)
        if dtype.kind == "b":
            return x != 0
    if not (is_integer(dtype) and x.dtype.is_floating):
        return tf.cast(x, target)
    x, limits = widened(x), np.iinfo(dtype)
    above = x >= tf.constant(2.0**limits.bits / (2 if limits.min else 1), x.dtype)
    below = x <= tf.constant(float(limits.min), x.dtype)
    x = tf.where(above | below | tf.math.is_nan(x), tf.zeros_like(x), x)
    intermediate = tf.int64 if limits.bits < 64 else target
    bounds = (tf.constant(np.asarray(bound, dtype)) for bound in (limits.max, limits.min))
    converted, most, fewest = (tf.cast(tf.cast(v, intermediate), target) for v in (x, *bounds))
    return tf.where(above, most, tf.where(below, fewest, converted))


def _bools(compute: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function of any dtypes, from one of bools; numbers are true unless 0."""
    return lambda *inputs: compute(*map(cast_to_bool, inputs))


def cast_to_bool(x: tf.Tensor) -> tf.Tensor:
    """Returns bools: whether numbers are not 0."""
    return x if x.dtype == tf.bool else x != tf.zeros_like(x)


def _real(x: tf.Tensor) -> tf.Tensor:
    return tf.math.real(x) if x.dtype.is_complex else x


def _imaginary(x: tf.Tensor) -> tf.Tensor:
    return tf.math.imag(x) if x.dtype.is_complex else tf.zeros_like(x)


def _of_floats(compute: Callable[[tf.Tensor], tf.Tensor], for_integers: bool) -> Callable[..., Any]:
    """Returns a test for all dtypes, from one for floats; integers give `for_integers`."""

    def test(x: tf.Tensor) -> tf.Tensor:
        if x.dtype.is_complex:
            parts = compute(tf.math.real(x)), compute(tf.math.imag(x))
            return parts[0] & parts[1] if for_integers else parts[0] | parts[1]
        return compute(x) if x.dtype.is_floating else tf.fill(x.shape, for_integers)

    return wide(test)


def _arithmetic(compute: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function for all dtypes, from one that TensorFlow lacks for small integers."""
    return lambda *inputs: compute(*(widened(x) if x.dtype in _SMALL else x for x in inputs))


def _select(condition: tf.Tensor, x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    return tf.where(cast_to_bool(condition), x, y)


def _broadcast(x: tf.Tensor, y: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    sizes = tf.broadcast_static_shape(x.shape, y.shape)
    return tf.broadcast_to(x, sizes), tf.broadcast_to(y, sizes)


def _cast(machine: Machine, instruction: Instruction, inputs: Arrays) -> tf.Tensor:
    x = numbers(inputs[0], instruction.inputs[0].dtype)
    dtype = instruction.outputs[0].dtype
    return to_bits(x, dtype) if is_float8(dtype) else cast(x, dtype)


_OWN: Mapping[str, Callable[..., Any]] = {
    **bits.FUNCTIONS,
    **{name: wide(function) for name, function in special.FUNCTIONS.items()},
    "add": _arithmetic(tf.add),
    "cbrt": wide(_cbrt),
    "complex": lambda x, y: tf.complex(*_broadcast(x, y)),
    "conj": tf.math.conj,
    "divide": _arithmetic(tf.divide),
    "equal": tf.equal,
    "exp2": wide(lambda x: tf.pow(tf.constant(2, x.dtype), x)),
    "floor_divide": wide(_by_zero_is_zero(_floor_divide)),
    "hypot": wide(_hypot),
    "imag": _imaginary,
    "isfinite": _of_floats(tf.math.is_finite, True),
    "isinf": _of_floats(tf.math.is_inf, False),
    "isnan": _of_floats(tf.math.is_nan, False),
    "log10": wide(_logarithm(10)),
    "log2": wide(_logarithm(2)),
    "logaddexp": wide(_logaddexp),
    "logical_and": _bools(tf.logical_and),
    "logical_not": _bools(tf.logical_not),
    "logical_or": _bools(tf.logical_or),
    "logical_xor": _bools(tf.math.logical_xor),
    "maximum": wide(largest),
    "minimum": wide(least),
    "multiply": _arithmetic(tf.multiply),
    "negative": _negative,
    "not_equal": tf.not_equal,
    "power": wide(_power),
    "power_of_two": wide(_power_of_two),
    "real": _real,
    "remainder": wide(_by_zero_is_zero(_remainder)),
    "select": _select,
    "square": _arithmetic(tf.square),
    "subtract": _arithmetic(tf.subtract),
    "trunc": wide(_trunc),
}

EMITTERS: Mapping[str, Emitter] = {
    name: elementwise(function) for name, function in functions(_OWN, [tf.math], wide).items()
} | {"cast": _cast}
