"""Elementwise operations: arithmetic, functions, comparisons and logic.

One statement defines such an operation: its name, its slopes, the kinds of dtype it takes, its
docstring, and facts such as `linear` or `symbol` (`Primitive`). It also needs an example in
`examples`, a word in its file's `__all__` and in `meshdsl/language.py`, and a line in the table of
each backend whose framework has no function of its name. `special`, `bits` and `complex_numbers`
define more operations.

The cotangent of a complex number z is dL/d(real z) - i dL/d(imag z), as JAX has it, so that the
slope of a function with a complex derivative is that derivative.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from meshdsl.ops.creation import as_tensor
from meshdsl.ops.elementwise.broadcasting import (
    Unary,
    add_elementwise,
    as_bool,
    binary,
    bind_elementwise,
    elementwise,
    unary,
)
from meshdsl.ops.operation import operation
from meshdsl.tensors.dtypes import (
    as_dtype,
    holds,
    is_complex,
    largest,
    need_kind,
    real_dtype,
    short,
)
from meshdsl.tensors.tensor import Tensor
from meshdsl.tracing.graph import Aval, Form, Operation, Primitive, Work
from meshdsl.tracing.trace import bind_one

__all__ = [
    "abs",
    "acos",
    "acosh",
    "add",
    "asin",
    "asinh",
    "atan",
    "atan2",
    "atanh",
    "cast",
    "cbrt",
    "ceil",
    "clip",
    "cos",
    "cosh",
    "divide",
    "divmod",
    "equal",
    "exp",
    "exp2",
    "expm1",
    "floor",
    "floor_divide",
    "greater",
    "greater_equal",
    "hypot",
    "isfinite",
    "isinf",
    "isnan",
    "less",
    "less_equal",
    "log",
    "log1p",
    "log2",
    "log10",
    "logaddexp",
    "logical_and",
    "logical_not",
    "logical_or",
    "logical_xor",
    "maximum",
    "minimum",
    "mod",
    "multiply",
    "nan_to_num",
    "negative",
    "not_equal",
    "power",
    "power_of_two",
    "reciprocal",
    "remainder",
    "round",
    "rsqrt",
    "sigmoid",
    "sign",
    "sin",
    "sinh",
    "sqrt",
    "square",
    "stop_gradient",
    "subtract",
    "tan",
    "tanh",
    "trunc",
    "where",
]

# Slopes that need more than a line.


def _base_slope(g: Tensor, z: Tensor, x: Tensor, y: Tensor) -> Tensor:
    return g * y * where(y == 0, 1, power(x, where(y == 0, 1, y - 1)))


def _exponent_slope(g: Tensor, z: Tensor, x: Tensor, y: Tensor) -> Tensor:
    return g * where(x == 0, 0, z * log(where(x == 0, 1, x)))


def _abs_slope(g: Tensor, y: Tensor, x: Tensor) -> Tensor:
    if not is_complex(x.dtype):
        return g * sign(x)
    return cast(where(y == 0, 0, g / where(y == 0, 1, y)), x.dtype) * conjugate(x)


def _where_or_zero(keep: Tensor, value: Tensor) -> Tensor:
    return where(keep, value, 0)


def _zero_or_where(drop: Tensor, value: Tensor) -> Tensor:
    return where(drop, 0, value)


def _share(x: Tensor, y: Tensor) -> Tensor:
    """Returns x's share in the slope of max(x, y): 1, 0, or 1/2 where they are equal."""
    return cast(x > y, x.dtype) + 0.5 * cast(x == y, x.dtype)


def _towards(x: Tensor, y: Tensor) -> Tensor:
    """Returns exp(x) / (exp(x) + exp(y)), also where both are infinite."""
    return sigmoid(where(isinf(x) & (x == y), 0, x - y))


def _ratio(x: Tensor, y: Tensor) -> Tensor:
    """Returns x / y, and 0 where y is."""
    return x / where(y == 0, 1, y) * cast(y != 0, x.dtype)


STEP, DIVISION, BOTH = Work.STEP, Work.DIVISION, (0, 1)

negative = unary(
    "negative", lambda g, y, x: -g, "fic", "Returns -x.", work=STEP, linear=(0,), symbol="-"
)
conjugate: Unary = unary(
    "conj",
    lambda g, y, x: conjugate(g),
    "c",
    "The conjugate.",
    work=Work.STEP,
    linear=(0,),
)
exp = unary("exp", lambda g, y, x: g * y, "fc", "Returns e to the x.")
exp2 = unary("exp2", lambda g, y, x: g * (y * math.log(2)), "f", "Returns 2 to the x.")
expm1 = unary("expm1", lambda g, y, x: g * (y + 1), "fc", "Returns exp(x) - 1, exact near 0.")
log = unary("log", lambda g, y, x: g / x, "fc", "Returns the natural logarithm.")
log2 = unary("log2", lambda g, y, x: g / (x * math.log(2)), "f", "Returns the logarithm to base 2.")
log10 = unary(
    "log10", lambda g, y, x: g / (x * math.log(10)), "f", "Returns the logarithm to base 10."
)
log1p = unary("log1p", lambda g, y, x: g / (x + 1), "fc", "Returns log(1 + x), exact near 0.")
sqrt = unary("sqrt", lambda g, y, x: g * 0.5 / y, "fc", "Returns the square root.")
rsqrt = unary("rsqrt", lambda g, y, x: g * -0.5 * (y / x), "fc", "Returns 1 / sqrt(x).")
cbrt = unary("cbrt", lambda g, y, x: g / (3 * square(y)), "f", "Returns the cube root.")
square: Unary = unary("square", lambda g, y, x: g * (2 * x), "fic", "Returns x * x.", work=STEP)
sin = unary("sin", lambda g, y, x: g * cos(x), "fc", "Returns the sine; x in radians.")
cos: Unary = unary("cos", lambda g, y, x: -g * sin(x), "fc", "Returns the cosine; x in radians.")
tan = unary("tan", lambda g, y, x: g * (1 + square(y)), "fc", "Returns the tangent.")
asin = unary("asin", lambda g, y, x: g / sqrt(1 - square(x)), "f", "Returns the inverse sine.")
acos = unary("acos", lambda g, y, x: -g / sqrt(1 - square(x)), "f", "Returns the inverse cosine.")
atan = unary("atan", lambda g, y, x: g / (1 + square(x)), "f", "Returns the inverse tangent.")
sinh = unary("sinh", lambda g, y, x: g * cosh(x), "fc", "Returns the hyperbolic sine.")
cosh: Unary = unary("cosh", lambda g, y, x: g * sinh(x), "fc", "Returns the hyperbolic cosine.")
tanh = unary("tanh", lambda g, y, x: g * (1 - square(y)), "fc", "Returns the hyperbolic tangent.")
asinh = unary("asinh", lambda g, y, x: g / sqrt(square(x) + 1), "f", "Returns sinh's inverse.")
acosh = unary("acosh", lambda g, y, x: g / sqrt(square(x) - 1), "f", "Returns cosh's inverse.")
atanh = unary("atanh", lambda g, y, x: g / (1 - square(x)), "f", "Returns tanh's inverse.")
sigmoid = unary("sigmoid", lambda g, y, x: g * (y * (1 - y)), "f", "Returns 1 / (1 + exp(-x)).")
abs = unary("abs", _abs_slope, "fic", "Returns the magnitude.", work=STEP, result=real_dtype)
sign = unary("sign", None, "fi", "Returns -1, 0 or 1.", work=STEP)
floor = unary("floor", None, "f", "Returns the largest whole number not above x.", work=STEP)
ceil = unary("ceil", None, "f", "Returns the smallest whole number not below x.", work=STEP)
trunc = unary("trunc", None, "f", "Returns x without its fraction.", work=STEP)
round = unary("round", None, "f", "Returns the nearest whole number, halves to even.", work=STEP)
power_of_two = unary(
    "power_of_two",
    None,
    "f",
    "Returns the largest power of two that is not above |x|; 0 of 0 and of subnormal numbers of "
    "float32 and float64, infinity of infinity and NaN.",
    work=STEP,
)
isfinite = unary(
    "isfinite", None, "fc", "Returns where x is not infinite or NaN.", work=STEP, result=as_bool
)
isinf = unary("isinf", None, "fc", "Returns where x is infinite.", work=STEP, result=as_bool)
isnan = unary("isnan", None, "fc", "Returns where x is not a number.", work=STEP, result=as_bool)
logical_not = unary("logical_not", None, "b", "Returns not x.", work=STEP, symbol="~")

add = binary(
    "add",
    [lambda g, z, x, y: g, lambda g, z, x, y: g],
    "fic",
    "Returns x + y.",
    linear=BOTH,
    additive=True,
    symbol="+",
)
subtract = binary(
    "subtract",
    [lambda g, z, x, y: g, lambda g, z, x, y: -g],
    "fic",
    "Returns x - y.",
    linear=BOTH,
    additive=True,
    symbol="-",
)
multiply = binary(
    "multiply",
    [lambda g, z, x, y: g * y, lambda g, z, x, y: g * x],
    "fic",
    "Returns x * y.",
    linear=BOTH,
    symbol="*",
)
divide = binary(
    "divide",
    [lambda g, z, x, y: g / y, lambda g, z, x, y: -g * (z / y)],
    "fc",
    "Returns x / y.",
    work=DIVISION,
    linear=(0,),
    symbol="/",
)
maximum = binary(
    "maximum",
    [lambda g, z, x, y: g * _share(x, y), lambda g, z, x, y: g * _share(y, x)],
    "fi",
    "Returns the larger of x and y; the slope is shared where equal.",
)
minimum = binary(
    "minimum",
    [lambda g, z, x, y: g * _share(y, x), lambda g, z, x, y: g * _share(x, y)],
    "fi",
    "Returns the smaller of x and y; the slope is shared where equal.",
)
power = binary(
    "power",
    [_base_slope, _exponent_slope],
    "fic",
    "Returns x to the y; a whole number to a negative one is 0.",
    work=Work.FUNCTION,
    symbol="**",
)
remainder = binary(
    "remainder",
    [lambda g, z, x, y: g, lambda g, z, x, y: -g * floor(x / y)],
    "fi",
    "Returns x modulo y, with the sign of y; of whole numbers, 0 where y is 0.",
    work=Work.FUNCTION,
    symbol="%",
)
mod = remainder
floor_divide = binary(
    "floor_divide",
    [None, None],
    "fi",
    "Returns the largest whole number not above x / y; of whole numbers, 0 where y is 0.",
    work=DIVISION,
    symbol="//",
)
atan2 = binary(
    "atan2",
    [lambda g, z, x, y: g * y / _norm2(x, y), lambda g, z, x, y: -g * x / _norm2(x, y)],
    "f",
    "Returns the angle of the point at height x over y, from -pi to pi.",
    work=Work.FUNCTION,
)
hypot = binary(
    "hypot",
    [lambda g, z, x, y: g * _ratio(x, z), lambda g, z, x, y: g * _ratio(y, z)],
    "f",
    "Returns sqrt(x * x + y * y) without overflow; its slope is 0 at 0.",
    work=Work.FUNCTION,
)
logaddexp = binary(
    "logaddexp",
    [lambda g, z, x, y: g * _towards(x, y), lambda g, z, x, y: g * _towards(y, x)],
    "f",
    "Returns log(exp(x) + exp(y)) without overflow.",
    work=Work.FUNCTION,
)
equal = binary("equal", [None, None], "fibc", "Returns where x == y.", result=as_bool, symbol="==")
not_equal = binary(
    "not_equal", [None, None], "fibc", "Returns where x != y.", result=as_bool, symbol="!="
)
less = binary("less", [None, None], "fi", "Returns where x < y.", result=as_bool, symbol="<")
less_equal = binary(
    "less_equal", [None, None], "fi", "Returns where x <= y.", result=as_bool, symbol="<="
)
greater = binary("greater", [None, None], "fi", "Returns where x > y.", result=as_bool, symbol=">")
greater_equal = binary(
    "greater_equal", [None, None], "fi", "Returns where x >= y.", result=as_bool, symbol=">="
)
logical_and = binary("logical_and", [None, None], "b", "Returns x and y.", symbol="&")
logical_or = binary("logical_or", [None, None], "b", "Returns x or y.", symbol="|")
logical_xor = binary("logical_xor", [None, None], "b", "Returns x or y, not both.", symbol="^")

SELECT = elementwise(
    "select",
    [
        None,
        lambda g, z, c, x, y: _where_or_zero(c, g),
        lambda g, z, c, x, y: _zero_or_where(c, g),
    ],
    "fibc",
    work=Work.NONE,
    linear=(1, 2),
    additive=True,
    word="where",
)


def _norm2(x: Tensor, y: Tensor) -> Tensor:
    return square(x) + square(y)


def _cast_rule(inputs: Sequence[Tensor], params: Mapping[str, Any]) -> list[Aval]:
    (x,), dtype = inputs, params["dtype"]
    if is_complex(x.dtype) and not is_complex(dtype):
        raise ValueError(
            f"{short(x.dtype)} to {short(dtype)} would drop the imaginary part; "
            "take a part of it, as in md.real(x)"
        )
    return [(x.shape, dtype)]


def _cast_gradient(op: Operation, cotangents: Sequence, wanted: Sequence[bool]) -> list[Tensor]:
    (cotangent,), dtype = cotangents, op.inputs[0].dtype
    if is_complex(cotangent.dtype) and not is_complex(dtype):
        # `complex_numbers` is made of `cast`, whose gradient takes a real part.
        from meshdsl.ops.elementwise.complex_numbers import real

        cotangent = real(cotangent)
    return [cast(cotangent, dtype)]


def _exact(cast: Operation) -> tuple[int, ...]:
    """Returns the operand of a cast that rounds no number. Such a cast is linear."""
    return (0,) if holds(cast.outputs[0].dtype, cast.inputs[0].dtype) else ()


CAST = Primitive(
    "cast",
    _cast_rule,
    _cast_gradient,
    work=Work.NONE,
    form=Form.ELEMENTWISE,
    positionwise=True,
    linear=_exact,
)
STOP_GRADIENT = Primitive(
    "stop_gradient",
    lambda inputs, params: [(inputs[0].shape, inputs[0].dtype)],
    lambda op, cotangents, wanted: [None],
    work=Work.NONE,
    form=Form.ELEMENTWISE,
    positionwise=True,
    linear=(0,),
)
add_elementwise(CAST)
add_elementwise(STOP_GRADIENT)


@operation
def where(condition: Tensor | bool, x: Any, y: Any) -> Tensor:
    """Returns x where the bool tensor `condition` is true, else y.

    One of the three has the dims of all, as in every elementwise operation; else it is
    `md.outer(md.where, mask, x, y)`.

    Raises:
        ValueError: the condition is not bool, the dtypes of x and y differ, a dim has two sizes, or
            none of the three has the dims of all.

    Examples:
        >>> x = md.named([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]], ["batch", "length"])
        >>> mask = md.named([True, True, False], ["length"])
        >>> print(md.where(mask, x, 0))
        f32[batch=2, length=3] [[1. 2. 0.]
         [4. 5. 0.]]
    """
    condition = as_tensor(condition)
    if condition.dtype != np.bool_:
        raise ValueError(f"the condition must be bool, got {short(condition.dtype)}")
    known = [value.dtype for value in (x, y) if isinstance(value, Tensor)]
    like = known[0] if known else None
    operands = (condition, as_tensor(x, like), as_tensor(y, like))
    return bind_elementwise(SELECT, operands)


@operation
def cast(x: Tensor, dtype: Any) -> Tensor:
    """Returns x with another dtype.

    A cast to an integer dtype rounds toward zero. Numbers outside of its range become the nearest
    number in it, and NaN becomes 0.

    Raises:
        ValueError: the dtype is unknown, or would drop the imaginary part of complex numbers.

    Examples:
        >>> x = md.named([-1.5, 2.7, 300.0, np.nan], ["feature"])
        >>> print(md.cast(x, "int8"))
        s8[feature=4] [ -1   2 127   0]
    """
    dtype = as_dtype(dtype)
    return x if x.dtype == dtype else bind_one(CAST, (x,), {"dtype": dtype})


@operation
def stop_gradient(x: Tensor) -> Tensor:
    """Returns x, which `grad` treats as a constant.

    Examples:
        >>> x = md.named([1.0, 2.0], ["feature"])
        >>> slope = md.grad(lambda x: md.sum(x * md.stop_gradient(x)))
        >>> print(slope(x))
        f32[feature=2] [1. 2.]
    """
    return bind_one(STOP_GRADIENT, (x,))


@operation
def reciprocal(x: Tensor) -> Tensor:
    """Returns 1 / x.

    Raises:
        ValueError: x is neither floating-point nor complex.

    Examples:
        >>> x = md.named([1.0, 4.0], ["feature"])
        >>> print(md.reciprocal(x))
        f32[feature=2] [1.   0.25]
    """
    return divide(1, x)


@operation
def divmod(x: Any, y: Any) -> tuple[Tensor, Tensor]:
    """Returns x // y and x % y.

    Raises:
        ValueError: as for `floor_divide`.

    Examples:
        >>> quotient, rest = md.divmod(md.named([-7, 7], ["feature"]), 3)
        >>> print(quotient, rest)
        s32[feature=2] [-3  2] s32[feature=2] [2 1]
    """
    return floor_divide(x, y), remainder(x, y)


@operation
def clip(x: Tensor, low: Any = None, high: Any = None) -> Tensor:
    """Returns x limited to [low, high], tensors or numbers; None is no limit.

    `md.clip(x, -1, 1)`. Where low is above high, the result is high.

    Raises:
        ValueError: as for `maximum`.

    Examples:
        >>> x = md.named([[-3.0, 0.5], [2.0, 9.0]], ["batch", "feature"])
        >>> print(md.clip(x, -1, 1))
        f32[batch=2, feature=2] [[-1.   0.5]
         [ 1.   1. ]]
        >>> print(md.clip(x, high=md.named([0.0, 4.0], ["batch"])))
        f32[batch=2, feature=2] [[-3.  0.]
         [ 2.  4.]]
    """
    x = x if low is None else maximum(x, low)
    return x if high is None else minimum(x, high)


@operation
def nan_to_num(
    x: Tensor, nan: float = 0.0, posinf: float | None = None, neginf: float | None = None
) -> Tensor:
    """Returns x with numbers in place of NaN and the infinities.

    By default NaN gives 0, and an infinity the largest number of its sign.

    Raises:
        ValueError: x is not floating-point.

    Examples:
        >>> x = md.named([1.0, np.nan, -np.inf], ["feature"])
        >>> print(md.nan_to_num(x, nan=-1.0, neginf=-9.0))
        f32[feature=3] [ 1. -1. -9.]
    """
    need_kind(x.dtype, "f")
    limit = largest(x.dtype)
    x = where(isnan(x), nan, x)
    x = where(x == math.inf, limit if posinf is None else posinf, x)
    return where(x == -math.inf, -limit if neginf is None else neginf, x)
