"""Linear recurrences along one dim of a shard: h[i] = decay[i] * h[i-1] + x[i].

The results are those of a loop that rounds each step. If all states are finite, a scan computes
them in a logarithmic number of steps, with products of decays as mantissas and exponents. Else the
loop runs: a state that has left the range stays infinite or NaN, which a scan cannot express.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from meshdsl.lowering.backends import recurrence_codes as transfers
from meshdsl.lowering.backends.common.arrange import align
from meshdsl.lowering.backends.tf import namespace as xp
from meshdsl.lowering.backends.tf.machine import Arrays, Emitter, Machine
from meshdsl.lowering.backends.tf.operations.cumulative import (
    WIDE,
    axis_and_direction,
    scan,
    shifted,
)
from meshdsl.lowering.backends.tf.operations.scaling import frexp, multiply, scaled
from meshdsl.lowering.backends.tf.operations.wire_dtypes import as_words, from_words
from meshdsl.lowering.parameters import Cumulative, parameters_of
from meshdsl.lowering.program import Instruction

Step = Callable[[Sequence[tf.Tensor], Sequence[tf.Tensor]], Sequence[tf.Tensor]]


def _recurrence(machine: Machine, instruction: Instruction, inputs: Arrays) -> tf.Tensor:
    """Returns the states; the state before the first step is the start, or zero."""
    at, reverse = axis_and_direction(instruction, 1)
    decay, x = _decay_and_x(instruction, inputs)
    first = _edge(x, at, reverse)
    start = inputs[2] if len(inputs) > 2 else tf.zeros_like(tf.squeeze(first, at))
    states = _states(machine, decay, x, start, at, reverse)
    if not parameters_of(instruction, Cumulative)["exclusive"]:
        return states
    previous = xp.slice_axis(states, int(reverse), states.shape[at] - 1, at)
    begin = tf.expand_dims(start, at)
    return tf.concat([previous, begin] if reverse else [begin, previous], at)


def _states(
    machine: Machine, decay: tf.Tensor, x: tf.Tensor, start: tf.Tensor, at: int, reverse: bool
) -> tf.Tensor:
    """Returns the state after each step, from a scan, or from a loop if one is not finite."""
    size, before = x.shape[at], tf.expand_dims(start, at)
    # The start is the x of an additional first step; the decay of that step has no effect.
    longer = [
        tf.concat([v, first] if reverse else [first, v], at)
        for v, first in ((decay, tf.ones_like(before)), (x, before))
    ]
    if x.dtype.is_integer:
        return xp.slice_axis(
            _of_integers(longer[0], longer[1], at, reverse)[1], int(not reverse), size, at
        )
    scanned = scan(_compose, [*frexp(longer[0]), longer[1]], [0.5, 1, 0], at, reverse)[2]
    scanned = xp.slice_axis(scanned, int(not reverse), size, at)

    def loop() -> tf.Tensor:
        def step(state: Sequence[tf.Tensor], row: Sequence[tf.Tensor]) -> Sequence[tf.Tensor]:
            return [row[0] * state[0] + row[1]]

        rows = xp.moveaxis(decay, at, 0), xp.moveaxis(x, at, 0)
        return xp.moveaxis(_looped(machine, step, [start], rows, reverse, True)[1], 0, at)

    return tf.ensure_shape(tf.cond(_are_finite(decay, scanned), lambda: scanned, loop), x.shape)


def _are_finite(decay: tf.Tensor, states: tf.Tensor) -> tf.Tensor:
    """Whether all decays and states are finite."""
    return tf.reduce_all(_is_finite(decay)) & tf.reduce_all(_is_finite(states))


def _is_finite(x: tf.Tensor) -> tf.Tensor:
    if x.dtype.is_complex:
        return _is_finite(tf.math.real(x)) & _is_finite(tf.math.imag(x))
    return tf.math.is_finite(x)


def _of_integers(decay: tf.Tensor, x: tf.Tensor, at: int, reverse: bool) -> Sequence[tf.Tensor]:
    """Returns the products of the decays up to each step, and the states."""

    def compose(first: Sequence[tf.Tensor], second: Sequence[tf.Tensor]) -> Sequence[tf.Tensor]:
        return [first[0] * second[0], first[1] * second[0] + second[1]]

    steps = [as_words(v, WIDE) for v in (decay, x)]
    return [from_words(v, x.dtype) for v in scan(compose, steps, [1, 0], at, reverse)]


def _compose(first: Sequence[tf.Tensor], second: Sequence[tf.Tensor]) -> Sequence[tf.Tensor]:
    """Composes two ranges of steps: mantissas and exponents of their decays, and last states."""
    mantissa, exponent = frexp(first[2])
    carried = scaled(mantissa * second[0], exponent + second[1])
    return *multiply((first[0], first[1]), (second[0], second[1])), carried + second[2]


def _looped(
    machine: Machine,
    step: Step,
    start: Sequence[tf.Tensor],
    rows: Sequence[tf.Tensor],
    reverse: bool,
    inclusive: bool,
) -> tuple[Sequence[tf.Tensor], tf.Tensor]:
    """Returns the last state of a loop over rows, and the first part of the state at each row.

    Args:
        inclusive: whether that is the state after the row; else, before it.
    """
    length, like = rows[0].shape[0], start[0]
    # XLA supports only tensors; a host would copy a tensor for each row.
    uses_lists = not machine.links.compiled
    blank: Any = tf.zeros([length, *like.shape], like.dtype)
    if uses_lists:
        blank = tf.TensorArray(like.dtype, length, element_shape=like.shape)

    def body(number: tf.Tensor, states: Any, *state: tf.Tensor) -> Sequence[Any]:
        at = length - 1 - number if reverse else number
        after = list(step(state, [tf.gather(row, at) for row in rows]))
        recorded = after[0] if inclusive else state[0]
        if uses_lists:
            states = states.write(at, recorded)
        else:
            states = tf.raw_ops.InplaceUpdate(x=states, i=at[None], v=recorded[None])
        return [number + 1, states, *after]

    _, states, *last = tf.while_loop(
        lambda number, *_: number < length,
        body,
        [tf.constant(0, tf.int32), blank, *start],
        parallel_iterations=1,
        maximum_iterations=length,
    )
    states = states.stack() if uses_lists else states
    return last, tf.ensure_shape(states, [length, *like.shape])


def _totals(machine: Machine, instruction: Instruction, inputs: Arrays) -> Sequence[tf.Tensor]:
    """Returns the shard's transfer: see `transfers`; for integers, offset and factor."""
    at, reverse = axis_and_direction(instruction, 1)
    decay, x = _decay_and_x(instruction, inputs)
    if x.dtype.is_integer:
        last = [_edge(v, at, not reverse) for v in _of_integers(decay, x, at, reverse)]
        return [tf.squeeze(v, at) for v in reversed(last)]
    scanned = scan(_compose, [*frexp(decay), x], [0.5, 1, 0], at, reverse)
    last = [tf.squeeze(_edge(v, at, not reverse), at) for v in scanned]

    def transfer() -> Sequence[tf.Tensor]:
        mantissa, exponent, offset = last
        largest = tf.reduce_max(tf.where(scanned[0] == 0, 1, scanned[1]), at)
        largest = tf.maximum(largest, 1)
        up = mantissa if x.dtype.is_complex else tf.sign(mantissa) * mantissa.dtype.max * 2
        return [offset, mantissa, _code(exponent, largest, up, -up, largest < 0)]

    def loop() -> Sequence[tf.Tensor]:
        blank = tf.zeros_like(last[2])
        ones = tf.ones_like(last[1], tf.int32)
        infinite = tf.constant(float("inf"), x.dtype)
        start = [blank, blank + infinite, blank - infinite, blank + 0.5, ones, ones, ones < 0]
        rows = xp.moveaxis(decay, at, 0), xp.moveaxis(x, at, 0)
        offset, up, down, mantissa, exponent, largest, stops = _looped(
            machine, _add_step, start, rows, reverse, True
        )[0]
        mantissa = tf.where(_is_finite(offset), mantissa, tf.zeros_like(mantissa))
        return [offset, mantissa, _code(exponent, largest, up, down, stops)]

    results = tf.cond(_are_finite(decay, scanned[2]), transfer, loop)
    return [tf.ensure_shape(v, blank.shape) for v, blank in zip(results, last, strict=True)]


def _add_step(carry: Sequence[tf.Tensor], row: Sequence[tf.Tensor]) -> Sequence[tf.Tensor]:
    """Appends a step to a transfer, which is the carry."""
    (offset, up, down, mantissa, exponent, largest, stops), (decay, x) = carry, row
    after = decay * offset + x
    if not x.dtype.is_complex:
        overflows = ~_is_finite(decay * offset) | (_is_finite(x) & ~_is_finite(after))
        # Here is the first value that is not finite, and its sign depends on the state before.
        starts = (
            _is_finite(offset)
            & (tf.math.is_inf(decay) | (_is_finite(decay) & overflows))
            & (mantissa != 0)
        )
        stops = stops | starts
    counts = _is_finite(offset) & _is_finite(decay) & ~stops
    offset = tf.where(stops, offset, after)
    is_finite = _is_finite(offset) & ~stops
    factor, power = multiply((mantissa, exponent), frexp(decay))
    mantissa, exponent = tf.where(is_finite, factor, mantissa), tf.where(is_finite, power, exponent)
    largest = tf.where(counts & (factor != 0), tf.maximum(largest, power), largest)
    return [offset, decay * up + x, decay * down + x, mantissa, exponent, largest, stops]


def _code(
    exponent: tf.Tensor, largest: tf.Tensor, up: tf.Tensor, down: tf.Tensor, stops: tf.Tensor
) -> tf.Tensor:
    """Returns the code of a transfer; up and down are its last states after inf and -inf."""
    none = tf.zeros_like(exponent)
    sides = [none, none]
    if not up.dtype.is_complex:
        inf = float("inf")
        sides = [
            tf.where(v == inf, transfers.UP, tf.where(v == -inf, transfers.DOWN, none))
            for v in (up, down)
        ]
    limit = transfers.LIMIT
    exponent, largest = (tf.clip_by_value(v, -limit, limit) for v in (exponent, largest))
    up, down = sides
    return transfers.pack(exponent, largest, up, down, tf.cast(stops, tf.int32))


def _after(state: tf.Tensor, offset: tf.Tensor, mantissa: tf.Tensor, code: tf.Tensor) -> tf.Tensor:
    """Returns the last state of a shard, from the state before it and the shard's transfer."""
    exponent, largest, *infinite, stops = transfers.unpack(code)
    number, power = frexp(state)
    value = scaled(number * mantissa, power + exponent) + offset
    limit = int(np.finfo(state.dtype.real_dtype.as_numpy_dtype).maxexp)
    overflows = ~_is_finite(state) | ((state != 0) & (power + largest - 2 >= limit))
    nan = tf.constant(float("nan"), state.dtype)
    if state.dtype.is_complex:
        return tf.where(overflows, nan, value)
    inf = tf.constant(float("inf"), state.dtype)
    up, down = (
        tf.where(v == transfers.UP, inf, tf.where(v == transfers.DOWN, -inf, nan)) for v in infinite
    )
    side = tf.where(overflows, tf.sign(state), tf.sign(value) * tf.sign(mantissa))
    infinite_state = tf.where(side > 0, up, tf.where(side < 0, down, nan))
    return tf.where(overflows | (stops > 0), infinite_state, value)


def _states_before(machine: Machine, instruction: Instruction, inputs: Arrays) -> tf.Tensor:
    """Returns the state before each row, where the first is zero and each row is a transfer."""
    at, reverse = axis_and_direction(instruction, 0)
    if len(inputs) == 2:
        states = _of_integers(inputs[1], inputs[0], at, reverse)[1]
        return shifted(states, at, 1, reverse, tf.zeros([], states.dtype))
    rows = [xp.moveaxis(row, at, 0) for row in inputs]

    def step(state: Sequence[tf.Tensor], row: Sequence[tf.Tensor]) -> Sequence[tf.Tensor]:
        return [_after(state[0], *row)]

    start = [tf.zeros_like(rows[0][0])]
    return xp.moveaxis(_looped(machine, step, start, rows, reverse, False)[1], 0, at)


def _edge(x: tf.Tensor, at: int, late: bool) -> tf.Tensor:
    """Returns the first position along an axis, or the last one."""
    return xp.slice_axis(x, x.shape[at] - 1 if late else 0, 1, at)


def _decay_and_x(instruction: Instruction, inputs: Arrays) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the decays and x with the same order of dims."""
    decay = align(xp, inputs[0], *(value.local for value in instruction.inputs[:2]))
    return decay, inputs[1]


EMITTERS: Mapping[str, Emitter] = {
    "linear_recurrence": _recurrence,
    "linear_recurrence_from": _recurrence,
    "recurrence_totals": _totals,
    "states_before": _states_before,
}
