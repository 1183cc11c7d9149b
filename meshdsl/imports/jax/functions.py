"""Functions of the language that compute what elementwise primitives of JAX compute, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

import meshdsl.ops as ops
from meshdsl.ops.elementwise.arithmetic import stop_gradient
from meshdsl.tensors.dtypes import is_float
from meshdsl.tensors.tensor import Tensor


def _of_kind(of_bools: Callable[..., Tensor], of_numbers: Callable[..., Tensor]) -> Callable:
    def function(*tensors: Tensor) -> Tensor:
        return (of_bools if tensors[0].dtype == np.bool_ else of_numbers)(*tensors)

    return function


def _abs(x: Tensor) -> Tensor:
    """Returns the magnitude, whose slope at 0 is 1 in JAX; that of `ops.abs` is 0."""
    if not is_float(x.dtype):
        return ops.abs(x)
    return ops.where(ops.equal(x, 0), x - stop_gradient(x), ops.abs(x))  # 0 of -0


def _clamp(low: Tensor, x: Tensor, high: Tensor) -> Tensor:
    """Returns x between two bounds; where it is equal to one, the slopes are 0, as in JAX."""
    clamped = ops.minimum(ops.maximum(x, low), high)
    if not is_float(x.dtype):
        return clamped
    inside = ops.logical_and(ops.greater(x, low), ops.less(x, high))
    below = ops.logical_and(ops.less(x, low), ops.less(low, high))
    outside = ops.where(ops.greater(x, high), high, stop_gradient(clamped))
    return ops.where(inside, x, ops.where(below, low, outside))


def _divide(x: Tensor, y: Tensor) -> Tensor:
    """Returns the quotient; of integers, rounded to zero."""
    if is_float(x.dtype) or x.dtype.kind == "c":
        return ops.divide(x, y)
    quotient = ops.floor_divide(x, y)
    if x.dtype.kind == "u":
        return quotient
    return quotient + ops.cast(_rounds_down(x, y, ops.remainder(x, y)), x.dtype)


def _rounds_down(x: Tensor, y: Tensor, rest: Tensor) -> Tensor:
    """Whether x / y, with this remainder, is rounded down where XLA rounds to zero."""
    signs_differ = ops.not_equal(ops.less(x, 0), ops.less(y, 0))
    return ops.logical_and(ops.not_equal(rest, 0), signs_differ)


def _remainder(x: Tensor, y: Tensor) -> Tensor:
    """Returns the remainder with the sign of x, as XLA has it."""
    if is_float(x.dtype):
        rest = ops.sign(x) * ops.remainder(ops.abs(x), ops.abs(y))
        # The slope at 0 is 1, which neither `sign` nor `abs` lets through.
        # Neither 0 nor NaN divides it.
        return ops.where(ops.logical_and(ops.equal(x, 0), ops.abs(y) > 0), x, rest)
    rest = ops.remainder(x, y)
    if x.dtype.kind == "u":
        return rest
    return ops.where(_rounds_down(x, y, rest), rest - y, rest)


def _choose(condition: Tensor, *cases: Tensor) -> Tensor:
    if condition.dtype == np.bool_:
        return ops.where(condition, cases[-1], cases[0])
    chosen = cases[0]
    for number, case in enumerate(cases[1:], 1):
        chosen = ops.where(condition >= number, case, chosen)
    return chosen


def integer_power(x: Tensor, exponent: int) -> Tensor:
    """Returns a power by repeated multiplication, which is exact for integers."""
    product = None
    square, left = x, abs(exponent)
    while left:
        if left & 1:
            product = square if product is None else product * square
        left >>= 1
        square = square * square if left else square
    if product is None:
        return ops.ones(x.shape, x.dtype)
    return ops.reciprocal(product) if exponent < 0 else product


FUNCTIONS: Mapping[str, Callable[..., Tensor]] = {
    "abs": _abs,
    "acos": ops.acos,
    "acosh": ops.acosh,
    "add": ops.add,
    "add_any": ops.add,
    "and": _of_kind(ops.logical_and, ops.bit_and),
    "asin": ops.asin,
    "asinh": ops.asinh,
    "atan": ops.atan,
    "atan2": ops.atan2,
    "atanh": ops.atanh,
    "bessel_i0e": ops.bessel_i0e,
    "bessel_i1e": ops.bessel_i1e,
    "cbrt": ops.cbrt,
    "ceil": ops.ceil,
    "clamp": _clamp,
    "complex": ops.complex,
    "conj": ops.conj,
    "cos": ops.cos,
    "cosh": ops.cosh,
    "digamma": ops.digamma,
    "div": _divide,
    "eq": ops.equal,
    "erf": ops.erf,
    "erf_inv": ops.erf_inv,
    "erfc": ops.erfc,
    "exp": ops.exp,
    "exp2": ops.exp2,
    "expm1": ops.expm1,
    "floor": ops.floor,
    "ge": ops.greater_equal,
    "gt": ops.greater,
    "imag": ops.imag,
    "is_finite": ops.isfinite,
    "le": ops.less_equal,
    "lgamma": ops.lgamma,
    "log": ops.log,
    "log1p": ops.log1p,
    "logistic": ops.sigmoid,
    "lt": ops.less,
    "max": ops.maximum,
    "min": ops.minimum,
    "mul": ops.multiply,
    "ne": ops.not_equal,
    "neg": ops.negative,
    "not": _of_kind(ops.logical_not, ops.bit_not),
    "or": _of_kind(ops.logical_or, ops.bit_or),
    "population_count": ops.population_count,
    "pow": lambda x, y: ops.power(x, ops.cast(y, x.dtype)),
    "real": ops.real,
    "rem": _remainder,
    "rsqrt": ops.rsqrt,
    "select_n": _choose,
    "shift_left": ops.shift_left,
    "shift_right_arithmetic": ops.shift_right,
    "sign": ops.sign,
    "sin": ops.sin,
    "sinh": ops.sinh,
    "sqrt": ops.sqrt,
    "square": ops.square,
    "sub": ops.subtract,
    "tan": ops.tan,
    "tanh": ops.tanh,
    "xor": _of_kind(ops.logical_xor, ops.bit_xor),
}
