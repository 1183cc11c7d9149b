"""Linear recurrences along one dim of a shard: h[i] = decay[i] * h[i-1] + x[i].

The results are those of a loop that rounds each step. If no number can get lost, an associative
scan computes them in a logarithmic number of steps. The scan multiplies decays by themselves, and
such a product may leave the range though no state does. An overflow makes a state infinite or NaN;
then the loop runs instead. An underflow loses at most the least normal number times the largest
state, which is `_LARGE` at most; for larger states the loop runs, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from meshdsl.lowering.backends import recurrence_codes as transfers
from meshdsl.lowering.backends.jax.machine import Arrays, Emitter, Machine
from meshdsl.lowering.backends.jax.operations.direction import axis_and_direction, index_of, shifted
from meshdsl.lowering.backends.jax.operations.scaling import frexp, multiply, product, scaled
from meshdsl.lowering.parameters import Cumulative, parameters_of
from meshdsl.lowering.program import Instruction
from meshdsl.tensors.dtypes import is_complex, is_differentiable

_LARGE = 2.0**64


def _recurrence(machine: Machine, instruction: Instruction, inputs: Arrays) -> Any:
    """Returns the states; the state before the first step is the start, or zero."""
    decay, x = _decay_and_x(instruction, inputs)
    at, reverse = axis_and_direction(instruction, 1)
    start = inputs[2] if len(inputs) > 2 else None
    states = _states(decay, x, start, at, reverse)
    if parameters_of(instruction, Cumulative)["exclusive"]:
        states = shifted(states, at, reverse, 0)
        if start is not None:
            states = states.at[index_of(x.shape[at], 0, at, reverse)].set(start)
    return states


def _states(decay: Any, x: Any, start: Any, at: int, reverse: bool) -> Any:
    """Returns the state after each step, from a scan, or from a loop if the scan loses numbers."""
    first = index_of(x.shape[at], 0, at, reverse)
    x_from_start = x if start is None else x.at[first].add(decay[first] * start)
    scanned = _scan(decay, x_from_start, at, reverse)[1]
    if not is_differentiable(x.dtype):
        return scanned
    start = jnp.zeros_like(x[first]) if start is None else start

    def loop(decay: Any, x_from_start: Any, row: Any, start: Any) -> Any:
        def step(state: Any, row: Sequence[Any]) -> tuple[Any, Any]:
            state = _step(row[0], row[1], state)
            return state, state

        rows = jnp.moveaxis(decay, at, 0), jnp.moveaxis(x_from_start.at[first].set(row), at, 0)
        return jnp.moveaxis(lax.scan(step, start, rows, reverse=reverse)[1], 0, at)

    is_exact = _are_exact(scanned) & jnp.all(jnp.isfinite(decay[first]))
    return lax.cond(is_exact, lambda *_: scanned, loop, decay, x_from_start, x[first], start)


def _step(decay: Any, x: Any, state: Any) -> Any:
    """Returns the next state, with the product rounded before x is added."""
    # A fused multiply-add would hide the overflow of the product if x has the other sign.
    carried = decay * state
    if is_differentiable(x.dtype) and not is_complex(x.dtype):
        carried = jnp.where(jnp.isinf(carried), jnp.sign(carried) * jnp.inf, carried)
    return carried + x


def _scan(decay: Any, x: Any, at: int, reverse: bool) -> Any:
    """Returns the products of the decays up to each step, and the states."""

    def compose(first: Any, second: Any) -> Any:
        return first[0] * second[0], first[1] * second[0] + second[1]

    return lax.associative_scan(compose, (decay, x), reverse=reverse, axis=at)


def _are_exact(states: Any) -> Any:
    """Whether a scan has lost nothing: no state is NaN, infinite or larger than `_LARGE`."""
    return jnp.max(jnp.abs(states)) <= _LARGE


def _totals(machine: Machine, instruction: Instruction, inputs: Arrays) -> Sequence[Any]:
    """Returns the shard's transfer: see `transfers`; for integers, offset and factor."""
    decay, x = _decay_and_x(instruction, inputs)
    at, reverse = axis_and_direction(instruction, 1)
    last = index_of(x.shape[at], -1, at, reverse)
    if not is_differentiable(x.dtype):
        products, states = _scan(decay, x, at, reverse)
        return states[last], products[last]

    def transfer(decay: Any, offset: Any, largest: Any) -> Sequence[Any]:
        mantissa, exponent = product(*frexp(decay), [at])
        up = mantissa if is_complex(x.dtype) else jnp.sign(mantissa) * jnp.inf
        return offset, mantissa, _code(exponent, largest, up, -up, exponent != exponent)

    def shrinking(decay: Any, x: Any) -> Sequence[Any]:
        """Computes the transfer for decays up to 1 and small x: no partial state is large."""
        offset = _total(decay, x, at, reverse)
        return transfer(decay, offset, jnp.ones(offset.shape, jnp.int32))

    def growing(decay: Any, x: Any) -> Sequence[Any]:
        """Computes the transfer for all others, in a loop if a scan loses numbers."""
        products, states = _scan(decay, x, at, reverse)

        def scan(decay: Any, x: Any) -> Sequence[Any]:
            size = jnp.maximum(jnp.max(jnp.abs(products), at), 1)
            return transfer(decay, states[last], frexp(size)[1])

        is_exact = _are_exact(states) & jnp.all(jnp.isfinite(products))
        return lax.cond(is_exact, scan, loop, decay, x)

    def loop(decay: Any, x: Any) -> Sequence[Any]:
        rows = jnp.moveaxis(decay, at, 0), jnp.moveaxis(x, at, 0)
        blank = jnp.zeros_like(rows[1][0])
        zero = jnp.zeros(blank.shape, jnp.int32)
        start = (blank, blank + jnp.inf, blank - jnp.inf, blank + 0.5, zero + 1, zero + 1, zero > 0)
        state, _ = lax.scan(_add_step, start, rows, reverse=reverse)
        offset, up, down, mantissa, exponent, largest, stops = state
        mantissa = jnp.where(jnp.isfinite(offset), mantissa, 0)
        return offset, mantissa, _code(exponent, largest, up, down, stops)

    is_small = jnp.max(jnp.abs(x)) <= _LARGE / x.shape[at]
    shrinks = (jnp.max(jnp.abs(decay)) <= 1) & is_small
    return lax.cond(shrinks, shrinking, growing, decay, x)


def _total(decay: Any, x: Any, at: int, reverse: bool) -> Any:
    """Returns the last state from a zero start: composes neighbouring steps until one is left."""
    while x.shape[at] > 1:
        half, odd = divmod(x.shape[at], 2)
        pads = [(0, 0, 0)] * x.ndim
        pads[at] = (0, odd, 0) if reverse else (odd, 0, 0)
        sizes = (*x.shape[:at], half + odd, 2, *x.shape[at + 1 :])
        order = (1, 0) if reverse else (0, 1)
        (first_decay, next_decay), (first_x, next_x) = (
            [lax.index_in_dim(padded.reshape(sizes), i, at + 1, keepdims=False) for i in order]
            for padded in (
                lax.pad(v, jnp.asarray(fill, v.dtype), pads) for v, fill in ((decay, 1), (x, 0))
            )
        )
        decay, x = first_decay * next_decay, next_decay * first_x + next_x
    return lax.index_in_dim(x, 0, at, keepdims=False)


def _add_step(carry: tuple[Any, ...], row: tuple[Any, ...]) -> tuple[Any, None]:
    """Appends a step to a transfer, which is the carry."""
    (offset, up, down, mantissa, exponent, largest, stops), (decay, x) = carry, row
    after = _step(decay, x, offset)
    if not is_complex(x.dtype):
        overflows = ~jnp.isfinite(decay * offset) | (jnp.isfinite(x) & ~jnp.isfinite(after))
        # Here is the first value that is not finite, and its sign depends on the state before.
        starts = (
            jnp.isfinite(offset)
            & (jnp.isinf(decay) | (jnp.isfinite(decay) & overflows))
            & (mantissa != 0)
        )
        stops = stops | starts
    counts = jnp.isfinite(offset) & jnp.isfinite(decay) & ~stops
    offset = jnp.where(stops, offset, after)
    is_finite = jnp.isfinite(offset) & ~stops
    factor, power = multiply((mantissa, exponent), frexp(decay))
    mantissa = jnp.where(is_finite, factor, mantissa)
    exponent = jnp.where(is_finite, power, exponent)
    largest = jnp.where(counts & (factor != 0), jnp.maximum(largest, power), largest)
    up, down = decay * up + x, decay * down + x
    return (offset, up, down, mantissa, exponent, largest, stops), None


def _code(exponent: Any, largest: Any, up: Any, down: Any, stops: Any) -> Any:
    """Returns the code of a transfer; up and down are its last states after inf and -inf."""
    up, down = (
        jnp.where(v == jnp.inf, transfers.UP, jnp.where(v == -jnp.inf, transfers.DOWN, 0))
        for v in (up, down)
    )
    limit = transfers.LIMIT
    exponent, largest = jnp.clip(exponent, -limit, limit), jnp.minimum(largest, limit)
    return transfers.pack(exponent, largest, up, down, stops).astype(jnp.int32)


def _after(state: Any, offset: Any, mantissa: Any, code: Any) -> Any:
    """Returns the last state of a shard, from the state before it and the shard's transfer."""
    exponent, largest, *infinite, stops = transfers.unpack(code)
    up, down = (
        jnp.where(v == transfers.UP, jnp.inf, jnp.where(v == transfers.DOWN, -jnp.inf, jnp.nan))
        for v in infinite
    )
    number, power = frexp(state)
    value = scaled(number * mantissa, power + exponent) + offset
    limit = jnp.finfo(state.dtype).maxexp
    overflows = ~jnp.isfinite(state) | ((state != 0) & (power + largest - 2 >= limit))
    if is_complex(state.dtype):
        return jnp.where(overflows, jnp.nan, value)
    stopped = jnp.sign(value) * jnp.sign(mantissa)
    side = jnp.where(overflows, jnp.sign(state), stopped)
    infinite_state = jnp.where(side > 0, up, jnp.where(side < 0, down, jnp.nan))
    return jnp.where(overflows | (stops > 0), infinite_state, value).astype(state.dtype)


def _states_before(machine: Machine, instruction: Instruction, inputs: Arrays) -> Any:
    """Returns the state before each row, where the first is zero and each row is a transfer."""
    at, reverse = axis_and_direction(instruction, 0)
    rows = tuple(jnp.moveaxis(row, at, 0) for row in inputs)

    def step(state: Any, row: Sequence[Any]) -> tuple[Any, Any]:
        after = _after(state, *row) if len(row) == 3 else row[1] * state + row[0]
        return after, state

    states = lax.scan(step, jnp.zeros_like(rows[0][0]), rows, reverse=reverse)[1]
    return jnp.moveaxis(states, 0, at)


def _decay_and_x(instruction: Instruction, inputs: Arrays) -> tuple[Any, Any]:
    """Returns the decays and x with the same order of dims."""
    decay, x = instruction.inputs[:2]
    order = [decay.local.position(name) for name in x.local.names]
    return jnp.transpose(inputs[0], order), jnp.asarray(inputs[1])


EMITTERS: Mapping[str, Emitter] = {
    "linear_recurrence": _recurrence,
    "linear_recurrence_from": _recurrence,
    "recurrence_totals": _totals,
    "states_before": _states_before,
}
