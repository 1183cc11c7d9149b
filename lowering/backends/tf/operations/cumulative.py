"""Cumulative instructions along one dim of a shard.

Extremes are those of integers that order like the numbers (see `words`). What TensorFlow has no
function for is a scan: every place takes in the one before it, then the one 2 before, 4 before, and
so on, each of which stands for all that it has taken in.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import tensorflow as tf

from meshdsl.lowering.backends.common.arrange import permuted
from meshdsl.lowering.backends.tf import namespace as xp
from meshdsl.lowering.backends.tf.machine import Arrays, Emitter, Machine
from meshdsl.lowering.backends.tf.operations.scaling import in_rows, multiply, parted, scaled
from meshdsl.lowering.backends.tf.operations.wire_dtypes import as_keys, as_words, of_keys, of_words
from meshdsl.lowering.parameters import Before, Cumulative, Reduction, parameters_of
from meshdsl.lowering.program import Instruction
from meshdsl.tensors.dtypes import identity

WIDE = ("int32", "int64", "float32", "float64", "complex64", "complex128")

Join = Callable[[Sequence[tf.Tensor], Sequence[tf.Tensor]], Sequence[tf.Tensor]]


def moved(x: tf.Tensor, at: int, by: int, reverse: bool, fill: tf.Tensor) -> tf.Tensor:
    """Moves everything `by` places on; the first places get `fill`."""
    return xp.pad_axis(x, at, -by, by, fill) if reverse else xp.pad_axis(x, at, by, -by, fill)


def scan(
    join: Join, values: Sequence[tf.Tensor], fills: Sequence[float], at: int, reverse: bool
) -> Sequence[tf.Tensor]:
    """Returns, at every place, all values up to there joined; `fills` change nothing they join."""
    blanks = [
        tf.constant(np.asarray(f, v.dtype.as_numpy_dtype))
        for f, v in zip(fills, values, strict=True)
    ]
    by = 1
    while by < values[0].shape[at]:
        before = [moved(v, at, by, reverse, b) for v, b in zip(values, blanks, strict=True)]
        values, by = join(before, values), 2 * by
    return values


def _sum(x: tf.Tensor, at: int, reverse: bool) -> tf.Tensor:
    if x.dtype.is_complex:
        return tf.complex(*(_sum(y, at, reverse) for y in (tf.math.real(x), tf.math.imag(x))))
    return tf.cumsum(x, at, reverse=reverse)


def _products(factors: Sequence[tf.Tensor], at: int, reverse: bool) -> Sequence[tf.Tensor]:
    """Returns the (mantissa, exponent) of the product up to each place."""
    return scan(multiply, factors, [0.5, 1], at, reverse)


def _product(x: tf.Tensor, at: int, reverse: bool) -> tf.Tensor:
    """Partial products may leave the range where the results do not, so they are scaled."""
    if x.dtype.is_integer:
        return tf.math.cumprod(x, at, reverse=reverse)
    return scaled(*_products(parted(x), at, reverse))


def _max(x: tf.Tensor, at: int, reverse: bool) -> tf.Tensor:
    def join(first: Sequence[tf.Tensor], then: Sequence[tf.Tensor]) -> Sequence[tf.Tensor]:
        return [tf.maximum(first[0], then[0])]

    return scan(join, [x], [x.dtype.min], at, reverse)[0]


def _min(x: tf.Tensor, at: int, reverse: bool) -> tf.Tensor:
    return tf.bitwise.invert(_max(tf.bitwise.invert(x), at, reverse))


def _cumulative(compute: Callable[[tf.Tensor, int, bool], tf.Tensor], kind: str) -> Emitter:
    order = kind if kind in ("max", "min") else "sum"

    def emit(machine: Machine, instruction: Instruction, inputs: Arrays) -> tf.Tensor:
        (x,), dtype = inputs, instruction.inputs[0].dtype
        params = parameters_of(instruction, Cumulative)
        at, reverse = instruction.inputs[0].local.position(params["dim"]), params["reverse"]
        found = compute(as_keys(x, order, WIDE), at, reverse)
        found = of_keys(found, order, x.dtype)
        if params["exclusive"]:
            found = moved(found, at, 1, reverse, xp.asarray(identity(kind, dtype), dtype))
        return found

    return emit


def _product_from(machine: Machine, instruction: Instruction, inputs: Arrays) -> tf.Tensor:
    """The products of a start and all elements up to each."""
    (x, *start), (at, reverse) = inputs, way(instruction, 0)
    dtype, smooth = x.dtype, len(start) == 2
    rows = parted(x) if smooth else [as_words(x, WIDE)]
    begin = start if smooth else [as_words(start[0], WIDE)]
    factors = []
    for row, first in zip(rows, begin, strict=True):
        before = tf.expand_dims(first, at)
        factors.append(tf.concat([row, before] if reverse else [before, row], at))
    found = (
        scaled(*_products(factors, at, reverse)) if smooth else _product(factors[0], at, reverse)
    )
    return of_words(_inside(instruction, found, at), dtype)


def _products_before(
    machine: Machine, instruction: Instruction, inputs: Arrays
) -> Sequence[tf.Tensor]:
    """Before each row the product of those up to there; of floats, mantissas and exponents."""
    at, reverse = way(instruction, 0)
    if len(inputs) == 1:
        dtype = inputs[0].dtype
        found = [of_words(_product(as_words(inputs[0], WIDE), at, reverse), dtype)]
        fills = [tf.ones([], dtype)]
    else:
        found = list(_products(inputs, at, reverse))
        fills = [tf.constant(0.5, inputs[0].dtype), tf.ones([], tf.int32)]
    return [moved(v, at, 1, reverse, fill) for v, fill in zip(found, fills, strict=True)]


def _besides(factors: Sequence[tf.Tensor]) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the (mantissa, exponent) of the product of all other rows."""
    fills = [tf.constant(0.5, factors[0].dtype), tf.ones([], tf.int32)]
    before, after = (
        [moved(v, 0, 1, b, f) for v, f in zip(_products(factors, 0, b), fills, strict=True)]
        for b in (False, True)
    )
    return multiply(before, after)


def _products_besides(
    machine: Machine, instruction: Instruction, inputs: Arrays
) -> Sequence[tf.Tensor]:
    """Of rows of mantissas and exponents the product of all others."""
    at = instruction.inputs[0].local.position(*parameters_of(instruction, Reduction)["over"])
    return [xp.moveaxis(v, 0, at) for v in _besides([xp.moveaxis(v, at, 0) for v in inputs])]


def _prod_others(machine: Machine, instruction: Instruction, inputs: Arrays) -> tf.Tensor:
    """The products of all other elements along some dims, and of a number if there is one."""
    (x, *number), local = inputs, instruction.inputs[0].local
    over = [local.position(name) for name in parameters_of(instruction, Reduction)["over"]]
    order = [*over, *(at for at in range(len(local)) if at not in over)]
    parts = _besides([in_rows(v, over) for v in parted(x)])
    found = scaled(*(multiply(parts, number) if number else parts))
    found = tf.reshape(found, [x.shape[at] for at in order])
    return permuted(xp, found, np.argsort(order).tolist())


def way(instruction: Instruction, number: int) -> tuple[int, bool]:
    """Returns the axis along which an instruction goes, by its operand, and whether backwards."""
    params = parameters_of(instruction, Before)
    return instruction.inputs[number].local.position(params["dim"]), params["reverse"]


def _inside(instruction: Instruction, found: tf.Tensor, at: int) -> tf.Tensor:
    """Returns the results of an instruction, given those with one more step in front."""
    params = parameters_of(instruction, Cumulative)
    late = params["exclusive"] == params["reverse"]
    return xp.slice_axis(found, int(late), found.shape[at] - 1, at)


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
