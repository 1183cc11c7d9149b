"""Special functions: those of tf.math, with SciPy's values where they differ."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np
import tensorflow as tf

from meshdsl.lowering.backends.common.special import log_gamma


def _number(value: float, like: tf.Tensor) -> tf.Tensor:
    return tf.constant(value, like.dtype)


def _erf(x: tf.Tensor) -> tf.Tensor:
    # Squares of large numbers would be infinite; erf is 1 or -1 long before 10.
    bounded = tf.clip_by_value(x, _number(-10, x), _number(10, x))
    return tf.where(tf.math.is_nan(x), x, tf.math.erf(bounded))


def _erf_inv(x: tf.Tensor) -> tf.Tensor:
    """Returns the inverse of erf: near 0 improved by Newton's method, else from 1 - abs(x)."""
    size = tf.abs(x)
    far = -tf.sign(x) * tf.math.ndtri((1 - size) / 2) / math.sqrt(2)
    near = tf.math.erfinv(tf.where(size < 0.5, x, tf.zeros_like(x)))
    near -= (_erf(near) - x) * tf.exp(tf.square(near)) * (math.sqrt(math.pi) / 2)
    return tf.where(size < 0.5, near, far)


def _times(logarithm: Callable[[tf.Tensor], tf.Tensor]) -> Callable[..., tf.Tensor]:
    """Returns the product of x and a logarithm of y; 0 times any number is 0."""

    def compute(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        is_zero = (x == 0) & ~tf.math.is_nan(y)
        return tf.where(is_zero, _number(0, x), x * logarithm(y))

    return compute


def _zeta(s: tf.Tensor, q: tf.Tensor) -> tf.Tensor:
    """Returns Hurwitz's zeta function: inf where a term of the sum is, and 0 for infinite q."""
    is_pole = (s == 1) | ((s > 1) & (q <= 0) & (q == tf.math.floor(q)))
    is_zero = (s > 1) & (q == np.inf)
    value = tf.math.zeta(*(tf.where(is_pole | is_zero, _number(2, v), v) for v in (s, q)))
    return tf.where(is_pole, _number(np.inf, q), tf.where(is_zero, _number(0, q), value))


def _polygamma(n: tf.Tensor, x: tf.Tensor) -> tf.Tensor:
    """Returns derivatives of digamma (Abramowitz and Stegun, equation 6.4.10)."""
    half = n / 2
    sign = tf.where(half == tf.math.floor(half), _number(-1, n), _number(1, n))
    sign = tf.where(n == tf.math.floor(n), sign, _number(np.nan, n))
    value = sign * tf.exp(tf.math.lgamma(n + 1)) * _zeta(n + 1, x)
    return tf.where(n == 0, tf.math.digamma(x), value)


def _lgamma(x: tf.Tensor) -> tf.Tensor:
    # On TPUs it is XLA's; see `log_gamma`.
    def where(condition: tf.Tensor, one: tf.Tensor, other: tf.Tensor | float) -> tf.Tensor:
        return tf.where(condition, one, tf.cast(other, one.dtype))

    return log_gamma(x, x.dtype.size, tf.math.lgamma, tf.math.log, where)


FUNCTIONS: Mapping[str, Callable[..., tf.Tensor]] = {
    "erf": _erf,
    "erf_inv": _erf_inv,
    "lgamma": _lgamma,
    "polygamma": _polygamma,
    "xlog1py": _times(tf.math.log1p),
    "xlogy": _times(tf.math.log),
    "zeta": _zeta,
}
