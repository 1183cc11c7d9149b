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
from meshdsl.lowering.backends.tf.scaling import multiply, parted, scaled
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
    """Partial products may leave the range where the results do not, so they are scaled."""
    if x.dtype.is_integer:
        return tf.math.cumprod(x, at, reverse=reverse)
    return scaled(*_scan(multiply, parted(x), [0.5, 1], at, reverse))


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


def _product_from(machine: Machine, instruction: Instruction, inputs: Arrays) -> tf.Tensor:
    """The products of a start and all elements up to each."""
    (at, reverse), (x, start) = _way(instruction, 0), (as_words(v, _WIDE) for v in inputs)
    before = tf.expand_dims(start, at)
    parts = [x, before] if reverse else [before, x]
    return of_words(
        _inside(instruction, _product(tf.concat(parts, at), at, reverse), at), inputs[0].dtype
    )


def _recurrence(
    machine: Machine, instruction: Instruction, inputs: Arrays
) -> tuple[tf.Tensor, tf.Tensor]:
    dtype, (at, reverse) = inputs[1].dtype, _way(instruction, 1)
    states = _states(instruction, inputs, at, reverse)
    last = tf.squeeze(part(states, 0 if reverse else states.shape[at] - 1, 1, at), at)
    if instruction.params["exclusive"]:
        states = _moved(states, at, 1, reverse, tf.zeros([], dtype))
    return states, last


def _recurrence_from(machine: Machine, instruction: Instruction, inputs: Arrays) -> tf.Tensor:
    """A start is the state of one more step in front, whatever its decay."""
    at, reverse = _way(instruction, 1)
    start = tf.expand_dims(inputs[2], at)
    decay = align(inputs[0], *(value.local for value in instruction.inputs[:2]))
    ends = [tf.ones_like(start), start]
    rows = [
        tf.concat([v, end] if reverse else [end, v], at)
        for v, end in zip((decay, inputs[1]), ends, strict=True)
    ]
    return _inside(instruction, _joined(rows[0], rows[1], at, reverse), at)


def _states(instruction: Instruction, inputs: Arrays, at: int, reverse: bool) -> tf.Tensor:
    decay = align(inputs[0], *(value.local for value in instruction.inputs[:2]))
    return _joined(decay, inputs[1], at, reverse)


def _joined(decay: tf.Tensor, x: tf.Tensor, at: int, reverse: bool) -> tf.Tensor:
    """Returns h[i] = decay[i] * h[i-1] + x[i]; products of decays are scaled."""
    dtype = x.dtype
    if not dtype.is_integer:
        return _scan(_carry, [*parted(decay), x], [0.5, 1, 0], at, reverse)[2]

    def join(first: Sequence[tf.Tensor], then: Sequence[tf.Tensor]) -> Sequence[tf.Tensor]:
        return [first[0] * then[0], first[1] * then[0] + then[1]]

    steps = [as_words(v, _WIDE) for v in (decay, x)]
    return of_words(_scan(join, steps, [1, 0], at, reverse)[1], dtype)


def _carry(first: Sequence[tf.Tensor], then: Sequence[tf.Tensor]) -> Sequence[tf.Tensor]:
    """Joins two stretches: the mantissas and exponents of their decays, and the states."""
    mantissa, exponent = parted(first[2])
    carried = scaled(mantissa * then[0], exponent + then[1])
    return *multiply((first[0], first[1]), (then[0], then[1])), carried + then[2]


def _products_before(machine: Machine, instruction: Instruction, inputs: Arrays) -> tf.Tensor:
    """Before each row of mantissas and exponents the product of those up to there."""
    dtype, (at, reverse) = inputs[0].dtype, _way(instruction, 0)
    if len(inputs) == 1:
        found = of_words(_product(as_words(inputs[0], _WIDE), at, reverse), dtype)
    else:
        found = scaled(*_scan(multiply, inputs, [0.5, 1], at, reverse))
    return _moved(found, at, 1, reverse, tf.ones([], dtype))


def _states_before(machine: Machine, instruction: Instruction, inputs: Arrays) -> tf.Tensor:
    """Before each row the state; it is turned into `through` times it plus `last`."""
    last, through, *exponents = inputs
    at, reverse = _way(instruction, 0)
    if exponents:
        found = _scan(_carry, [through, exponents[0], last], [0.5, 1, 0], at, reverse)[2]
    else:
        found = _joined(through, last, at, reverse)
    return _moved(found, at, 1, reverse, tf.zeros([], last.dtype))


def _way(instruction: Instruction, number: int) -> tuple[int, bool]:
    """Returns the axis along which an instruction goes, by its operand, and whether backwards."""
    params = instruction.params
    return instruction.inputs[number].local.position(params["dim"]), params["reverse"]


def _inside(instruction: Instruction, found: tf.Tensor, at: int) -> tf.Tensor:
    """Returns the results of an instruction, given those with one more step in front."""
    late = instruction.params["exclusive"] == instruction.params["reverse"]
    return part(found, int(late), found.shape[at] - 1, at)


EMITTERS: Mapping[str, Emitter] = {
    "cumsum": _cumulative(_sum, "sum"),
    "cumprod": _cumulative(_product, "prod"),
    "cumprod_from": _product_from,
    "cummax": _cumulative(_max, "max"),
    "cummin": _cumulative(_min, "min"),
    "linear_recurrence": _recurrence,
    "linear_recurrence_from": _recurrence_from,
    "products_before": _products_before,
    "states_before": _states_before,
}
