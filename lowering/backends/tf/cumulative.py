"""Cumulative instructions along one dim of a shard.

Extremes are those of integers that order like the numbers (see `words`). What TensorFlow has no
function for is a scan: every place takes in the one before it, then the one 2 before, 4 before, and
so on, each of which stands for all that it has taken in.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import tensorflow as tf

from meshdsl.dtypes import identity
from meshdsl.lowering.backends.tf.machine import Arrays, Emitter, Machine, align, constant
from meshdsl.lowering.backends.tf.slicing import padded, part
from meshdsl.lowering.backends.tf.words import as_keys, as_words, of_keys, of_words
from meshdsl.lowering.program import Instruction

_WIDE = ("int32", "int64", "float32", "float64", "complex64", "complex128")

Join = Callable[[Sequence[tf.Tensor], Sequence[tf.Tensor]], Sequence[tf.Tensor]]


def _moved(x: tf.Tensor, at: int, by: int, reverse: bool, fill: tf.Tensor) -> tf.Tensor:
    """Moves everything `by` places on; the first places get `fill`."""
    return padded(x, at, -by, by, fill) if reverse else padded(x, at, by, -by, fill)


def _scan(
    join: Join, values: Sequence[tf.Tensor], fills: Sequence[float], at: int, reverse: bool
) -> Sequence[tf.Tensor]:
    """Returns, at every place, all values up to there joined; `fills` change nothing they join."""
    blanks = [
        tf.constant(np.asarray(f, v.dtype.as_numpy_dtype))
        for f, v in zip(fills, values, strict=True)
    ]
    by = 1
    while by < values[0].shape[at]:
        before = [_moved(v, at, by, reverse, b) for v, b in zip(values, blanks, strict=True)]
        values, by = join(before, values), 2 * by
    return values


def _sum(x: tf.Tensor, at: int, reverse: bool) -> tf.Tensor:
    if x.dtype.is_complex:
        return tf.complex(*(_sum(y, at, reverse) for y in (tf.math.real(x), tf.math.imag(x))))
    return tf.cumsum(x, at, reverse=reverse)


def _product(x: tf.Tensor, at: int, reverse: bool) -> tf.Tensor:
    if x.dtype.is_complex:
        return _scan(lambda first, then: [first[0] * then[0]], [x], [1], at, reverse)[0]
    return tf.math.cumprod(x, at, reverse=reverse)


def _max(x: tf.Tensor, at: int, reverse: bool) -> tf.Tensor:
    def join(first: Sequence[tf.Tensor], then: Sequence[tf.Tensor]) -> Sequence[tf.Tensor]:
        return [tf.maximum(first[0], then[0])]

    return _scan(join, [x], [x.dtype.min], at, reverse)[0]


def _min(x: tf.Tensor, at: int, reverse: bool) -> tf.Tensor:
    return tf.bitwise.invert(_max(tf.bitwise.invert(x), at, reverse))


def _cumulative(compute: Callable[[tf.Tensor, int, bool], tf.Tensor], kind: str) -> Emitter:
    order = kind if kind in ("max", "min") else "sum"

    def emit(machine: Machine, instruction: Instruction, inputs: Arrays) -> tf.Tensor:
        (x,), params, dtype = inputs, instruction.params, instruction.inputs[0].dtype
        at, reverse = instruction.inputs[0].local.position(params["dim"]), params["reverse"]
        found = compute(as_keys(x, order, _WIDE), at, reverse)
        found = of_keys(found, order, x.dtype)
        if params["exclusive"]:
            found = _moved(found, at, 1, reverse, constant(identity(kind, dtype), dtype))
        return found

    return emit


def _recurrence(
    machine: Machine, instruction: Instruction, inputs: Arrays
) -> tuple[tf.Tensor, tf.Tensor]:
    params, (one, other) = instruction.params, instruction.inputs
    dtype = inputs[1].dtype
    decay, x = align(inputs[0], one.local, other.local), inputs[1]
    at, reverse = other.local.position(params["dim"]), params["reverse"]

    def join(first: Sequence[tf.Tensor], then: Sequence[tf.Tensor]) -> Sequence[tf.Tensor]:
        return [first[0] * then[0], first[1] * then[0] + then[1]]

    steps = [as_words(v, _WIDE) for v in (decay, x)]
    states = of_words(_scan(join, steps, [1, 0], at, reverse)[1], dtype)
    last = tf.squeeze(part(states, 0 if reverse else x.shape[at] - 1, 1, at), at)
    if params["exclusive"]:
        states = _moved(states, at, 1, reverse, tf.zeros([], dtype))
    return states, last


EMITTERS: Mapping[str, Emitter] = {
    "cumsum": _cumulative(_sum, "sum"),
    "cumprod": _cumulative(_product, "prod"),
    "cummax": _cumulative(_max, "max"),
    "cummin": _cumulative(_min, "min"),
    "linear_recurrence": _recurrence,
}
