"""Special functions of mathematics, as SciPy has them under `scipy.special`."""

from __future__ import annotations

import math

from meshdsl.ops.elementwise.arithmetic import exp, log, log1p, sign, square, where
from meshdsl.ops.elementwise.broadcasting import Binary, Unary, binary, unary
from meshdsl.ops.operation import operation
from meshdsl.tensors.tensor import Tensor
from meshdsl.tracing.graph import Work

__all__ = [
    "bessel_i0e",
    "bessel_i1e",
    "digamma",
    "erf",
    "erf_inv",
    "erfc",
    "lgamma",
    "logit",
    "polygamma",
    "xlog1py",
    "xlogy",
    "zeta",
]

_SLOPE = 2 / math.sqrt(math.pi)  # of erf at 0


def _bessel_i1e_slope(g: Tensor, y: Tensor, x: Tensor) -> Tensor:
    safe = where(x == 0, 1, x)
    return g * where(x == 0, 0.5, bessel_i0e(x) - y * (sign(x) + 1 / safe))


def _none_by_order(g: Tensor, z: Tensor, n: Tensor, x: Tensor) -> Tensor:
    raise ValueError(
        "polygamma and zeta have no gradient by their first operand; wrap it in "
        "md.stop_gradient(...) if it is a constant there"
    )


def _zero_times(x: Tensor, y: Tensor) -> Tensor:
    """Returns x / y, and 0 where x is."""
    return where(x == 0, 0, x / where(x == 0, 1, y))


erf = unary("erf", lambda g, y, x: g * (_SLOPE * exp(-square(x))), "f", "The error function.")
erfc = unary(
    "erfc",
    lambda g, y, x: g * (-_SLOPE * exp(-square(x))),
    "f",
    "Returns 1 - erf(x), exact near 1.",
)
erf_inv = unary(
    "erf_inv", lambda g, y, x: g * (exp(square(y)) / _SLOPE), "f", "The inverse of erf."
)
lgamma = unary("lgamma", lambda g, y, x: g * digamma(x), "f", "Returns log(abs(gamma(x))).")
digamma: Unary = unary("digamma", lambda g, y, x: g * polygamma(1, x), "f", "The slope of lgamma.")
bessel_i0e = unary(
    "bessel_i0e",
    lambda g, y, x: g * (bessel_i1e(x) - sign(x) * y),
    "f",
    "Returns exp(-abs(x)) times the modified Bessel function of order 0.",
)
bessel_i1e: Unary = unary(
    "bessel_i1e",
    _bessel_i1e_slope,
    "f",
    "Returns exp(-abs(x)) times the modified Bessel function of order 1.",
)
polygamma: Binary = binary(
    "polygamma",
    [_none_by_order, lambda g, z, n, x: g * polygamma(n + 1, x)],
    "f",
    "Returns the derivative of order x of digamma at y; x is an integer.",
    work=Work.FUNCTION,
)
zeta: Binary = binary(
    "zeta",
    [_none_by_order, lambda g, z, s, q: g * -s * zeta(s + 1, q)],
    "f",
    "Returns Hurwitz's zeta function: the sum of (y + k) ** -x over k = 0, 1, ...; x above 1.",
    work=Work.FUNCTION,
)
xlogy = binary(
    "xlogy",
    [lambda g, z, x, y: g * log(y), lambda g, z, x, y: g * _zero_times(x, y)],
    "f",
    "Returns x * log(y), and 0 where x is.",
    work=Work.FUNCTION,
)
xlog1py = binary(
    "xlog1py",
    [lambda g, z, x, y: g * log1p(y), lambda g, z, x, y: g * _zero_times(x, y + 1)],
    "f",
    "Returns x * log(1 + y), and 0 where x is.",
    work=Work.FUNCTION,
)


@operation
def logit(x: Tensor) -> Tensor:
    """Returns log(x / (1 - x)), the inverse of sigmoid.

    Examples:
        >>> probability = md.named([0.0, 0.5, 0.9], ["feature"])
        >>> print(md.logit(probability))
        f32[feature=3] [  -inf 0.     2.1972]
    """
    return log(x) - log1p(-x)
