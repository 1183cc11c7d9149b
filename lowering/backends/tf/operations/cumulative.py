"""Cumulative instructions along one dim of a shard.

Maxima and minima are those of integers that order like the numbers (see `wire_dtypes`). If
TensorFlow has no function, a scan is used: each position is joined with the one before it, then
with the ones 2, 4, ... before it, which stand for all positions that they have been joined with.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import tensorflow as tf

from meshdsl.lowering.backends.common.arrange import permuted
from meshdsl.lowering.backends.tf import namespace as xp
from meshdsl.lowering.backends.tf.machine import Arrays, Emitter, Machine
from meshdsl.lowering.backends.tf.operations.scaling import frexp, in_rows, multiply, scaled
from meshdsl.lowering.backends.tf.operations.wire_dtypes import (
    as_keys,
    as_words,
    from_keys,
    from_words,
)
from meshdsl.lowering.parameters import Before, Cumulative, Reduction, parameters_of
from meshdsl.lowering.program import Instruction
from meshdsl.tensors.dtypes import identity

WIDE = ("int32", "int64", "float32", "float64", "complex64", "complex128")

Join = Callable[[Sequence[tf.Tensor], Sequence[tf.Tensor]], Sequence[tf.Tensor]]


def shifted(x: tf.Tensor, at: int, by: int, reverse: bool, fill: tf.Tensor) -> tf.Tensor:
    """Returns x shifted by some steps along an axis; the first steps become `fill`."""
    return xp.pad_axis(x, at, -by, by, fill) if reverse else xp.pad_axis(x, at, by, -by, fill)


def scan(
    join: Join, values: Sequence[tf.Tensor], fills: Sequence[float], at: int, reverse: bool
) -> Sequence[tf.Tensor]:
    """Returns the values joined up to each position; `fills` are the neutral element of `join`."""
    blanks = [
        tf.constant(np.asarray(f, v.dtype.as_numpy_dtype))
        for f, v in zip(fills, values, strict=True)
    ]
    distance = 1
    while distance < values[0].shape[at]:
        before = [shifted(v, at, distance, reverse, b) for v, b in zip(values, blanks, strict=True)]
        values, distance = join(before, values), 2 * distance
    return values


def _sum(x: tf.Tensor, at: int, reverse: bool) -> tf.Tensor:
    if x.dtype.is_complex:
        return tf.complex(*(_sum(y, at, reverse) for y in (tf.math.real(x), tf.math.imag(x))))
    return tf.cumsum(x, at, reverse=reverse)


def _products(factors: Sequence[tf.Tensor], at: int, reverse: bool) -> Sequence[tf.Tensor]:
    """Returns the (mantissa, exponent) of the product up to each position."""
    return scan(multiply, factors, [0.5, 1], at, reverse)


def _product(x: tf.Tensor, at: int, reverse: bool) -> tf.Tensor:
    """Returns the products up to each position, from mantissas and exponents for floats."""
    if x.dtype.is_integer:
        return tf.math.cumprod(x, at, reverse=reverse)
    # A partial product may leave the range though the results do not.
    return scaled(*_products(frexp(x), at, reverse))


def _max(x: tf.Tensor, at: int, reverse: bool) -> tf.Tensor:
    def join(first: Sequence[tf.Tensor], second: Sequence[tf.Tensor]) -> Sequence[tf.Tensor]:
        return [tf.maximum(first[0], second[0])]

    return scan(join, [x], [x.dtype.min], at, reverse)[0]


def _min(x: tf.Tensor, at: int, reverse: bool) -> tf.Tensor:
    return tf.bitwise.invert(_max(tf.bitwise.invert(x), at, reverse))


def _cumulative(compute: Callable[[tf.Tensor, int, bool], tf.Tensor], kind: str) -> Emitter:
    """Returns the emitter of a cumulative function; `kind` names its neutral element."""
    order = kind if kind in ("max", "min") else "sum"

    def emit(machine: Machine, instruction: Instruction, inputs: Arrays) -> tf.Tensor:
        (x,), dtype = inputs, instruction.inputs[0].dtype
        params = parameters_of(instruction, Cumulative)
        at, reverse = instruction.inputs[0].local.position(params["dim"]), params["reverse"]
        result = compute(as_keys(x, order, WIDE), at, reverse)
        result = from_keys(result, order, x.dtype)
        if params["exclusive"]:
            result = shifted(result, at, 1, reverse, xp.asarray(identity(kind, dtype), dtype))
        return result

    return emit


def _product_from(machine: Machine, instruction: Instruction, inputs: Arrays) -> tf.Tensor:
    """Returns the products of all elements up to each position, times a start."""
    (x, *start), (at, reverse) = inputs, axis_and_direction(instruction, 0)
    dtype, is_smooth = x.dtype, len(start) == 2
    rows = frexp(x) if is_smooth else [as_words(x, WIDE)]
    begin = start if is_smooth else [as_words(start[0], WIDE)]
    factors = []
    for row, first in zip(rows, begin, strict=True):
        before = tf.expand_dims(first, at)
        factors.append(tf.concat([row, before] if reverse else [before, row], at))
    result = (
        scaled(*_products(factors, at, reverse)) if is_smooth else _product(factors[0], at, reverse)
    )
    return from_words(_without_start(instruction, result, at), dtype)


def _products_before(
    machine: Machine, instruction: Instruction, inputs: Arrays
) -> Sequence[tf.Tensor]:
    """Returns the product of all rows before each row; for floats, mantissas and exponents."""
    at, reverse = axis_and_direction(instruction, 0)
    if len(inputs) == 1:
        dtype = inputs[0].dtype
        parts = [from_words(_product(as_words(inputs[0], WIDE), at, reverse), dtype)]
        fills = [tf.ones([], dtype)]
    else:
        parts = list(_products(inputs, at, reverse))
        # 0.5 * 2**1 is 1, the product of no rows.
        fills = [tf.constant(0.5, inputs[0].dtype), tf.ones([], tf.int32)]
    return [shifted(v, at, 1, reverse, fill) for v, fill in zip(parts, fills, strict=True)]


def _products_of_others(factors: Sequence[tf.Tensor]) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns for each row the (mantissa, exponent) of the product of all other rows."""
    fills = [tf.constant(0.5, factors[0].dtype), tf.ones([], tf.int32)]
    before, after = (
        [shifted(v, 0, 1, b, f) for v, f in zip(_products(factors, 0, b), fills, strict=True)]
        for b in (False, True)
    )
    return multiply(before, after)


def _products_besides(
    machine: Machine, instruction: Instruction, inputs: Arrays
) -> Sequence[tf.Tensor]:
    """Returns for each row, given by mantissas and exponents, the product of all other rows."""
    at = instruction.inputs[0].local.position(*parameters_of(instruction, Reduction)["over"])
    return [
        xp.moveaxis(v, 0, at) for v in _products_of_others([xp.moveaxis(v, at, 0) for v in inputs])
    ]


def _prod_others(machine: Machine, instruction: Instruction, inputs: Arrays) -> tf.Tensor:
    """Returns the products of all other elements along some dims, times a number if given."""
    (x, *number), local = inputs, instruction.inputs[0].local
    over = [local.position(name) for name in parameters_of(instruction, Reduction)["over"]]
    order = [*over, *(at for at in range(len(local)) if at not in over)]
    parts = _products_of_others([in_rows(v, over) for v in frexp(x)])
    result = scaled(*(multiply(parts, number) if number else parts))
    result = tf.reshape(result, [x.shape[at] for at in order])
    return permuted(xp, result, np.argsort(order).tolist())


def axis_and_direction(instruction: Instruction, number: int) -> tuple[int, bool]:
    """Returns the axis of operand `number` along which an instruction runs, and if in reverse."""
    params = parameters_of(instruction, Before)
    return instruction.inputs[number].local.position(params["dim"]), params["reverse"]


def _without_start(instruction: Instruction, longer: tf.Tensor, at: int) -> tf.Tensor:
    """Returns the results of an instruction, from results with the start as a first step."""
    params = parameters_of(instruction, Cumulative)
    late = params["exclusive"] == params["reverse"]
    return xp.slice_axis(longer, int(late), longer.shape[at] - 1, at)


EMITTERS: Mapping[str, Emitter] = {
    "cumsum": _cumulative(_sum, "sum"),
    "cumprod": _cumulative(_product, "prod"),
    "cumprod_from": _product_from,
    "cummax": _cumulative(_max, "max"),
    "cummin": _cumulative(_min, "min"),
    "products_before": _products_before,
    "products_besides": _products_besides,
    "prod_others": _prod_others,
}
