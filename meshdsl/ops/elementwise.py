"""Elementwise operations, broadcasting by dim name.

The result has every dim of the operands: those of the operand with most dims first, then the rest
in order of appearance. Tensors of different dtypes do not mix (cast one of them); Python numbers
take the dtype of the tensors they meet.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from meshdsl.dims import Dimension, Shape
from meshdsl.dtypes import as_dtype, is_float, is_integer, short
from meshdsl.graph import Aval, Operation, Primitive, Tensor
from meshdsl.ops.creation import as_tensor
from meshdsl.ops.operation import operation
from meshdsl.ops.reduction import sum_to
from meshdsl.trace import bind_one

Unary = Callable[[Any], Tensor]
Binary = Callable[[Any, Any], Tensor]
Slope = Callable[..., Tensor]  # (cotangent, output, *inputs) -> the cotangent of one input


def broadcast_shape(inputs: Sequence[Tensor]) -> Shape:
    """Returns the dims of the operands together.

    Raises:
        ValueError: one name has two sizes; each clash names both tensors and where they were made.
    """
    ordered = sorted(inputs, key=lambda t: -len(t.shape))
    first = ordered[0].shape
    if all(t.shape == first or not t.shape for t in ordered):
        return first
    owner: dict[str, Tensor] = {}
    found: dict[str, Dimension] = {}
    problems = []
    for tensor in ordered:
        for dim in tensor.shape:
            have = found.setdefault(dim.name, dim)
            other = owner.setdefault(dim.name, tensor)
            if have.size != dim.size:
                problems.append(
                    f"dim `{dim.name}` has size {have.size} in {other} (made at {other.source}) "
                    f"but {dim.size} in {tensor} (made at {tensor.source})"
                )
    if problems:
        raise ValueError("; ".join(problems))
    return Shape(found.values())


def _elementwise(
    name: str, slopes: Sequence[Slope | None], accepts: str, result: str = ""
) -> Primitive:
    """Makes an elementwise primitive.

    Args:
        slopes: one gradient rule per operand, None where the operation has no slope.
        accepts: kinds of dtype it takes: f(loat), i(nteger), b(ool).
        result: name of the dtype of the result; by default that of the operands.
    """

    def rule(inputs: Sequence[Tensor], params: Mapping[str, Any]) -> list[Aval]:
        alike = inputs[-2:] if name == "select" else inputs
        dtype = alike[-1].dtype
        if any(t.dtype != dtype for t in alike):
            raise ValueError(
                f"dtypes differ: {', '.join(short(t.dtype) for t in alike)}; "
                f"cast one, as in md.cast(x, {dtype.name!r})"
            )
        kind = "f" if is_float(dtype) else "i" if is_integer(dtype) else "b"
        if kind not in accepts:
            words = {"f": "floating-point", "i": "integer", "b": "bool"}
            wanted = " or ".join(words[k] for k in accepts)
            raise ValueError(f"needs {wanted} tensors, got {short(dtype)}")
        return [(broadcast_shape(inputs), np.dtype(result) if result else dtype)]

    def gradient(
        op: Operation, cotangents: Sequence[Tensor], wanted: Sequence[bool]
    ) -> list[Tensor | None]:
        (cotangent,) = cotangents
        return [
            sum_to(slope(cotangent, op.outputs[0], *op.inputs), tensor.shape)
            if want and slope is not None
            else None
            for slope, want, tensor in zip(slopes, wanted, op.inputs, strict=True)
        ]

    return Primitive(name, rule, gradient)


def _where_or_zero(keep: Tensor, value: Tensor) -> Tensor:
    return where(keep, value, 0)


def _zero_or_where(drop: Tensor, value: Tensor) -> Tensor:
    return where(drop, 0, value)


def _base_slope(g: Tensor, z: Tensor, x: Tensor, y: Tensor) -> Tensor:
    return g * y * where(y == 0, 1, power(x, where(y == 0, 1, y - 1)))


def _exponent_slope(g: Tensor, z: Tensor, x: Tensor, y: Tensor) -> Tensor:
    return g * where(x == 0, 0, z * log(where(x == 0, 1, x)))


def _cast_gradient(op: Operation, cotangents: Sequence, wanted: Sequence[bool]) -> list[Tensor]:
    return [cast(cotangents[0], op.inputs[0].dtype)]


_SQRT_PI = math.sqrt(math.pi)
UNARY = {
    p.name: p
    for p in (
        _elementwise("negative", [lambda g, y, x: -g], "fi"),
        _elementwise("exp", [lambda g, y, x: g * y], "f"),
        _elementwise("expm1", [lambda g, y, x: g * (y + 1)], "f"),
        _elementwise("log", [lambda g, y, x: g / x], "f"),
        _elementwise("log1p", [lambda g, y, x: g / (x + 1)], "f"),
        _elementwise("sqrt", [lambda g, y, x: g * 0.5 / y], "f"),
        _elementwise("rsqrt", [lambda g, y, x: g * -0.5 * (y / x)], "f"),
        _elementwise("square", [lambda g, y, x: g * (2 * x)], "fi"),
        _elementwise("sin", [lambda g, y, x: g * cos(x)], "f"),
        _elementwise("cos", [lambda g, y, x: -g * sin(x)], "f"),
        _elementwise("tanh", [lambda g, y, x: g * (1 - square(y))], "f"),
        _elementwise("sigmoid", [lambda g, y, x: g * (y * (1 - y))], "f"),
        _elementwise("erf", [lambda g, y, x: g * (2 / _SQRT_PI * exp(-square(x)))], "f"),
        _elementwise("abs", [lambda g, y, x: g * sign(x)], "fi"),
        _elementwise("sign", [None], "fi"),
        _elementwise("floor", [None], "f"),
        _elementwise("ceil", [None], "f"),
        _elementwise("round", [None], "f"),
        _elementwise("isfinite", [None], "f", "bool"),
        _elementwise("logical_not", [None], "b"),
    )
}
BINARY = {
    p.name: p
    for p in (
        _elementwise("add", [lambda g, z, x, y: g, lambda g, z, x, y: g], "fi"),
        _elementwise("subtract", [lambda g, z, x, y: g, lambda g, z, x, y: -g], "fi"),
        _elementwise("multiply", [lambda g, z, x, y: g * y, lambda g, z, x, y: g * x], "fi"),
        _elementwise("divide", [lambda g, z, x, y: g / y, lambda g, z, x, y: -g * (z / y)], "f"),
        _elementwise(
            "maximum",
            [lambda g, z, x, y: g * _share(x, y), lambda g, z, x, y: g * _share(y, x)],
            "fi",
        ),
        _elementwise(
            "minimum",
            [lambda g, z, x, y: g * _share(y, x), lambda g, z, x, y: g * _share(x, y)],
            "fi",
        ),
        _elementwise("power", [_base_slope, _exponent_slope], "fi"),
        _elementwise(
            "remainder", [lambda g, z, x, y: g, lambda g, z, x, y: -g * floor(x / y)], "fi"
        ),
        _elementwise("equal", [None, None], "fib", "bool"),
        _elementwise("not_equal", [None, None], "fib", "bool"),
        _elementwise("less", [None, None], "fi", "bool"),
        _elementwise("less_equal", [None, None], "fi", "bool"),
        _elementwise("greater", [None, None], "fi", "bool"),
        _elementwise("greater_equal", [None, None], "fi", "bool"),
        _elementwise("logical_and", [None, None], "b"),
        _elementwise("logical_or", [None, None], "b"),
    )
}
SELECT = _elementwise(
    "select",
    [
        None,
        lambda g, z, c, x, y: _where_or_zero(c, g),
        lambda g, z, c, x, y: _zero_or_where(c, g),
    ],
    "fib",
)
CAST = Primitive(
    "cast",
    lambda inputs, params: [(inputs[0].shape, params["dtype"])],
    _cast_gradient,
)
STOP_GRADIENT = Primitive(
    "stop_gradient",
    lambda inputs, params: [(inputs[0].shape, inputs[0].dtype)],
    lambda op, cotangents, wanted: [None],
)
ELEMENTWISE = frozenset([*UNARY, *BINARY, "select", "cast", "stop_gradient"])


def _share(x: Tensor, y: Tensor) -> Tensor:
    """Returns x's share in the slope of max(x, y): 1, 0, or 1/2 where they are equal."""
    return cast(x > y, x.dtype) + 0.5 * cast(x == y, x.dtype)


def _unary(name: str, doc: str) -> Callable[[Tensor], Tensor]:
    primitive = UNARY[name]

    def function(x: Any) -> Tensor:
        return bind_one(primitive, (as_tensor(x),))

    function.__name__ = function.__qualname__ = name
    function.__doc__ = doc
    return operation(function)


def _binary(name: str, doc: str) -> Callable[[Any, Any], Tensor]:
    primitive = BINARY[name]

    def function(x: Any, y: Any) -> Tensor:
        if isinstance(x, Tensor):
            return bind_one(primitive, (x, as_tensor(y, x.dtype)))
        if isinstance(y, Tensor):
            return bind_one(primitive, (as_tensor(x, y.dtype), y))
        left = as_tensor(x)
        return bind_one(primitive, (left, as_tensor(y, left.dtype)))

    function.__name__ = function.__qualname__ = name
    function.__doc__ = doc
    return operation(function)


negative: Unary = _unary("negative", "Returns -x.")
exp: Unary = _unary("exp", "Returns e to the x.")
expm1: Unary = _unary("expm1", "Returns exp(x) - 1, exact near 0.")
log: Unary = _unary("log", "Returns the natural logarithm.")
log1p: Unary = _unary("log1p", "Returns log(1 + x), exact near 0.")
sqrt: Unary = _unary("sqrt", "Returns the square root.")
rsqrt: Unary = _unary("rsqrt", "Returns 1 / sqrt(x).")
square: Unary = _unary("square", "Returns x * x.")
sin: Unary = _unary("sin", "Returns the sine; x in radians.")
cos: Unary = _unary("cos", "Returns the cosine; x in radians.")
tanh: Unary = _unary("tanh", "Returns the hyperbolic tangent.")
sigmoid: Unary = _unary("sigmoid", "Returns 1 / (1 + exp(-x)).")
erf: Unary = _unary("erf", "Returns the error function.")
abs: Unary = _unary("abs", "Returns the magnitude.")
sign: Unary = _unary("sign", "Returns -1, 0 or 1.")
floor: Unary = _unary("floor", "Returns the largest whole number not above x.")
ceil: Unary = _unary("ceil", "Returns the smallest whole number not below x.")
round: Unary = _unary("round", "Returns the nearest whole number, halves to even.")
isfinite: Unary = _unary("isfinite", "Returns where x is neither infinite nor NaN.")
logical_not: Unary = _unary("logical_not", "Returns not x, elementwise.")

add: Binary = _binary("add", "Returns x + y.")
subtract: Binary = _binary("subtract", "Returns x - y.")
multiply: Binary = _binary("multiply", "Returns x * y.")
divide: Binary = _binary("divide", "Returns x / y.")
maximum: Binary = _binary(
    "maximum", "Returns the larger of x and y; the slope is shared where equal."
)
minimum: Binary = _binary(
    "minimum", "Returns the smaller of x and y; the slope is shared where equal."
)
power: Binary = _binary("power", "Returns x to the y.")
remainder: Binary = _binary("remainder", "Returns x modulo y, with the sign of y.")
equal: Binary = _binary("equal", "Returns where x == y.")
not_equal: Binary = _binary("not_equal", "Returns where x != y.")
less: Binary = _binary("less", "Returns where x < y.")
less_equal: Binary = _binary("less_equal", "Returns where x <= y.")
greater: Binary = _binary("greater", "Returns where x > y.")
greater_equal: Binary = _binary("greater_equal", "Returns where x >= y.")
logical_and: Binary = _binary("logical_and", "Returns x and y, elementwise.")
logical_or: Binary = _binary("logical_or", "Returns x or y, elementwise.")


@operation
def where(condition: Tensor, x: Any, y: Any) -> Tensor:
    """Returns x where the bool tensor `condition` holds, else y."""
    if condition.dtype != np.bool_:
        raise ValueError(f"the condition must be bool, got {short(condition.dtype)}")
    known = [value.dtype for value in (x, y) if isinstance(value, Tensor)]
    like = known[0] if known else None
    return bind_one(SELECT, (condition, as_tensor(x, like), as_tensor(y, like)))


@operation
def cast(x: Tensor, dtype: Any) -> Tensor:
    """Returns x with another dtype."""
    dtype = as_dtype(dtype)
    return x if x.dtype == dtype else bind_one(CAST, (x,), {"dtype": dtype})


@operation
def stop_gradient(x: Tensor) -> Tensor:
    """Returns x; `grad` takes it for a constant."""
    return bind_one(STOP_GRADIENT, (x,))


@operation
def relu(x: Tensor) -> Tensor:
    """Returns max(x, 0), with slope 0 at 0."""
    return where(x > 0, x, 0)


@operation
def gelu(x: Tensor) -> Tensor:
    """Returns the Gaussian error linear unit, tanh form (Hendrycks and Gimpel 2016, section 2)."""
    inner = math.sqrt(2 / math.pi) * (x + 0.044715 * (x * x * x))
    return 0.5 * x * (1 + tanh(inner))


@operation
def silu(x: Tensor) -> Tensor:
    """Returns x * sigmoid(x)."""
    return x * sigmoid(x)


@operation
def softplus(x: Tensor) -> Tensor:
    """Returns log(1 + exp(x)) without overflow."""
    return maximum(x, 0) + log1p(exp(-abs(x)))


@operation
def clip(x: Tensor, low: float, high: float) -> Tensor:
    """Returns x limited to [low, high]."""
    return minimum(maximum(x, low), high)
