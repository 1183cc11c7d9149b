"""Linear recurrences along one dim of a shard: h[i] = decay[i] * h[i-1] + x[i].

They are those of a loop that rounds each step. Where all states are finite they are scanned, in a
logarithmic number of steps, with products of decays as mantissas and exponents. Else the loop is
run: a state that has left the range is infinite or NaN from there on, which a scan does not know.
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
from meshdsl.lowering.backends.tf.operations.cumulative import WIDE, moved, scan, way
from meshdsl.lowering.backends.tf.operations.scaling import multiply, parted, scaled
from meshdsl.lowering.backends.tf.operations.wire_dtypes import as_words, of_words
from meshdsl.lowering.parameters import Cumulative, parameters_of
from meshdsl.lowering.program import Instruction

Step = Callable[[Sequence[tf.Tensor], Sequence[tf.Tensor]], Sequence[tf.Tensor]]


def _recurrence(machine: Machine, instruction: Instruction, inputs: Arrays) -> tf.Tensor:
    """The states, from a start or from zero on."""
    at, reverse = way(instruction, 1)
    decay, x = _decay_and_x(instruction, inputs)
    first = _end(x, at, reverse)
    start = inputs[2] if len(inputs) > 2 else tf.zeros_like(tf.squeeze(first, at))
    found = _states(machine, decay, x, start, at, reverse)
    if not parameters_of(instruction, Cumulative)["exclusive"]:
        return found
    kept = xp.slice_axis(found, int(reverse), found.shape[at] - 1, at)
    begin = tf.expand_dims(start, at)
    return tf.concat([kept, begin] if reverse else [begin, kept], at)


def _states(
    machine: Machine, decay: tf.Tensor, x: tf.Tensor, start: tf.Tensor, at: int, reverse: bool
) -> tf.Tensor:
    """Returns the states; a start is that of one more step in front, whatever its decay."""
    size, before = x.shape[at], tf.expand_dims(start, at)
    longer = [
        tf.concat([v, first] if reverse else [first, v], at)
        for v, first in ((decay, tf.ones_like(before)), (x, before))
    ]
    if x.dtype.is_integer:
        return xp.slice_axis(
            _of_integers(longer[0], longer[1], at, reverse)[1], int(not reverse), size, at
        )
    found = scan(_carry, [*parted(longer[0]), longer[1]], [0.5, 1, 0], at, reverse)[2]
    found = xp.slice_axis(found, int(not reverse), size, at)

    def loop() -> tf.Tensor:
        def step(state: Sequence[tf.Tensor], row: Sequence[tf.Tensor]) -> Sequence[tf.Tensor]:
            return [row[0] * state[0] + row[1]]

        rows = xp.moveaxis(decay, at, 0), xp.moveaxis(x, at, 0)
        return xp.moveaxis(_looped(machine, step, [start], rows, reverse, True)[1], 0, at)

    return tf.ensure_shape(tf.cond(_is_tame(decay, found), lambda: found, loop), x.shape)


def _is_tame(decay: tf.Tensor, states: tf.Tensor) -> tf.Tensor:
    """Whether everything is finite."""
    return tf.reduce_all(_is_finite(decay)) & tf.reduce_all(_is_finite(states))


def _is_finite(x: tf.Tensor) -> tf.Tensor:
    if x.dtype.is_complex:
        return _is_finite(tf.math.real(x)) & _is_finite(tf.math.imag(x))
    return tf.math.is_finite(x)


def _of_integers(decay: tf.Tensor, x: tf.Tensor, at: int, reverse: bool) -> Sequence[tf.Tensor]:
    """Returns the products of the decays up to each place, and the states."""

    def join(first: Sequence[tf.Tensor], then: Sequence[tf.Tensor]) -> Sequence[tf.Tensor]:
        return [first[0] * then[0], first[1] * then[0] + then[1]]

    steps = [as_words(v, WIDE) for v in (decay, x)]
    return [of_words(v, x.dtype) for v in scan(join, steps, [1, 0], at, reverse)]


def _carry(first: Sequence[tf.Tensor], then: Sequence[tf.Tensor]) -> Sequence[tf.Tensor]:
    """Joins two stretches: the mantissas and exponents of their decays, and the states."""
    mantissa, exponent = parted(first[2])
    carried = scaled(mantissa * then[0], exponent + then[1])
    return *multiply((first[0], first[1]), (then[0], then[1])), carried + then[2]


def _looped(
    machine: Machine,
    step: Step,
    start: Sequence[tf.Tensor],
    rows: Sequence[tf.Tensor],
    reverse: bool,
    inclusive: bool,
) -> tuple[Sequence[tf.Tensor], tf.Tensor]:
    """Returns the last state of a loop over rows, and the first part of each state on the way.

    Args:
        inclusive: whether with the state after each row; else, before it.
    """
    length, like = rows[0].shape[0], start[0]
    # XLA has tensors only; a host would copy one each time.
    lists = not machine.links.compiled
    blank: Any = tf.zeros([length, *like.shape], like.dtype)
    if lists:
        blank = tf.TensorArray(like.dtype, length, element_shape=like.shape)

    def body(number: tf.Tensor, passed: Any, *state: tf.Tensor) -> Sequence[Any]:
        at = length - 1 - number if reverse else number
        after = list(step(state, [tf.gather(row, at) for row in rows]))
        noted = after[0] if inclusive else state[0]
        if lists:
            passed = passed.write(at, noted)
        else:
            passed = tf.raw_ops.InplaceUpdate(x=passed, i=at[None], v=noted[None])
        return [number + 1, passed, *after]

    _, passed, *end = tf.while_loop(
        lambda number, *_: number < length,
        body,
        [tf.constant(0, tf.int32), blank, *start],
        parallel_iterations=1,
        maximum_iterations=length,
    )
    passed = passed.stack() if lists else passed
    return end, tf.ensure_shape(passed, [length, *like.shape])


def _totals(machine: Machine, instruction: Instruction, inputs: Arrays) -> Sequence[tf.Tensor]:
    """What the shard makes of a state before it: see `transfers`; of integers two numbers."""
    at, reverse = way(instruction, 1)
    decay, x = _decay_and_x(instruction, inputs)
    if x.dtype.is_integer:
        ends = [_end(v, at, not reverse) for v in _of_integers(decay, x, at, reverse)]
        return [tf.squeeze(v, at) for v in reversed(ends)]
    found = scan(_carry, [*parted(decay), x], [0.5, 1, 0], at, reverse)
    ends = [tf.squeeze(_end(v, at, not reverse), at) for v in found]

    def tame() -> Sequence[tf.Tensor]:
        mantissa, exponent, offset = ends
        largest = tf.reduce_max(tf.where(found[0] == 0, 1, found[1]), at)
        largest = tf.maximum(largest, 1)
        up = mantissa if x.dtype.is_complex else tf.sign(mantissa) * mantissa.dtype.max * 2
        return [offset, mantissa, _code(exponent, largest, up, -up, largest < 0)]

    def loop() -> Sequence[tf.Tensor]:
        blank = tf.zeros_like(ends[2])
        one = tf.ones_like(ends[1], tf.int32)
        infinite = tf.constant(float("inf"), x.dtype)
        start = [blank, blank + infinite, blank - infinite, blank + 0.5, one, one, one < 0]
        rows = xp.moveaxis(decay, at, 0), xp.moveaxis(x, at, 0)
        offset, up, down, mantissa, exponent, largest, stops = _looped(
            machine, _one_more, start, rows, reverse, True
        )[0]
        mantissa = tf.where(_is_finite(offset), mantissa, tf.zeros_like(mantissa))
        return [offset, mantissa, _code(exponent, largest, up, down, stops)]

    results = tf.cond(_is_tame(decay, found[2]), tame, loop)
    return [tf.ensure_shape(v, blank.shape) for v, blank in zip(results, ends, strict=True)]


def _one_more(carry: Sequence[tf.Tensor], row: Sequence[tf.Tensor]) -> Sequence[tf.Tensor]:
    """Adds a step to what a shard makes of a state."""
    (offset, up, down, mantissa, exponent, largest, stops), (decay, x) = carry, row
    after = decay * offset + x
    if not x.dtype.is_complex:
        leaves = ~_is_finite(decay * offset) | (_is_finite(x) & ~_is_finite(after))
        new = (
            _is_finite(offset)
            & (tf.math.is_inf(decay) | (_is_finite(decay) & leaves))
            & (mantissa != 0)
        )
        stops = stops | new
    counts = _is_finite(offset) & _is_finite(decay) & ~stops
    offset = tf.where(stops, offset, after)
    goes = _is_finite(offset) & ~stops
    factor, power = multiply((mantissa, exponent), parted(decay))
    mantissa, exponent = tf.where(goes, factor, mantissa), tf.where(goes, power, exponent)
    largest = tf.where(counts & (factor != 0), tf.maximum(largest, power), largest)
    return [offset, decay * up + x, decay * down + x, mantissa, exponent, largest, stops]


def _code(
    exponent: tf.Tensor, largest: tf.Tensor, up: tf.Tensor, down: tf.Tensor, stops: tf.Tensor
) -> tf.Tensor:
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
    """Returns what a shard makes of a state."""
    exponent, largest, *infinite, stops = transfers.unpack(code)
    number, power = parted(state)
    value = scaled(number * mantissa, power + exponent) + offset
    most = int(np.finfo(state.dtype.real_dtype.as_numpy_dtype).maxexp)
    leaves = ~_is_finite(state) | ((state != 0) & (power + largest - 2 >= most))
    nan = tf.constant(float("nan"), state.dtype)
    if state.dtype.is_complex:
        return tf.where(leaves, nan, value)
    inf = tf.constant(float("inf"), state.dtype)
    up, down = (
        tf.where(v == transfers.UP, inf, tf.where(v == transfers.DOWN, -inf, nan)) for v in infinite
    )
    side = tf.where(leaves, tf.sign(state), tf.sign(value) * tf.sign(mantissa))
    infinite_state = tf.where(side > 0, up, tf.where(side < 0, down, nan))
    return tf.where(leaves | (stops > 0), infinite_state, value)


def _states_before(machine: Machine, instruction: Instruction, inputs: Arrays) -> tf.Tensor:
    """Before each row the state, by what the rows up to there make of zero."""
    at, reverse = way(instruction, 0)
    if len(inputs) == 2:
        found = _of_integers(inputs[1], inputs[0], at, reverse)[1]
        return moved(found, at, 1, reverse, tf.zeros([], found.dtype))
    rows = [xp.moveaxis(row, at, 0) for row in inputs]

    def step(state: Sequence[tf.Tensor], row: Sequence[tf.Tensor]) -> Sequence[tf.Tensor]:
        return [_after(state[0], *row)]

    start = [tf.zeros_like(rows[0][0])]
    return xp.moveaxis(_looped(machine, step, start, rows, reverse, False)[1], 0, at)


def _end(x: tf.Tensor, at: int, late: bool) -> tf.Tensor:
    """Returns the first position along an axis, or the last one."""
    return xp.slice_axis(x, x.shape[at] - 1 if late else 0, 1, at)


def _decay_and_x(instruction: Instruction, inputs: Arrays) -> tuple[tf.Tensor, tf.Tensor]:
    decay = align(xp, inputs[0], *(value.local for value in instruction.inputs[:2]))
    return decay, inputs[1]


EMITTERS: Mapping[str, Emitter] = {
    "linear_recurrence": _recurrence,
    "linear_recurrence_from": _recurrence,
    "recurrence_totals": _totals,
    "states_before": _states_before,
}
