"""Linear recurrences along one dim of a shard: h[i] = decay[i] * h[i-1] + x[i].

They are those of a loop that rounds each step. Where nothing can get lost they are scanned in a
logarithmic number of steps. A scan multiplies decays on their own, which may leave the range where
no state does: what overflows makes a state infinite or NaN, and then the loop is run instead. What
underflows loses at most the least normal number times the largest state, `_LARGE` at most; of
larger states the loop is run as well.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from meshdsl.lowering.backends import recurrence_codes as transfers
from meshdsl.lowering.backends.jax.machine import Arrays, Emitter, Machine
from meshdsl.lowering.backends.jax.operations.direction import place, shifted, way
from meshdsl.lowering.backends.jax.operations.scaling import multiply, parted, product, scaled
from meshdsl.lowering.parameters import Cumulative, parameters_of
from meshdsl.lowering.program import Instruction
from meshdsl.tensors.dtypes import is_complex, is_differentiable

_LARGE = 2.0**64


def _recurrence(machine: Machine, instruction: Instruction, inputs: Arrays) -> Any:
    """The states, from a start or from zero on."""
    decay, x = _decay_and_x(instruction, inputs)
    at, reverse = way(instruction, 1)
    start = inputs[2] if len(inputs) > 2 else None
    found = _states(decay, x, start, at, reverse)
    if parameters_of(instruction, Cumulative)["exclusive"]:
        found = shifted(found, at, reverse, 0)
        if start is not None:
            found = found.at[place(x.shape[at], 0, at, reverse)].set(start)
    return found


def _states(decay: Any, x: Any, start: Any, at: int, reverse: bool) -> Any:
    first = place(x.shape[at], 0, at, reverse)
    begun = x if start is None else x.at[first].add(decay[first] * start)
    found = _scan(decay, begun, at, reverse)[1]
    if not is_differentiable(x.dtype):
        return found
    start = jnp.zeros_like(x[first]) if start is None else start

    def loop(decay: Any, begun: Any, row: Any, start: Any) -> Any:
        def step(state: Any, row: Sequence[Any]) -> tuple[Any, Any]:
            state = _step(row[0], row[1], state)
            return state, state

        rows = jnp.moveaxis(decay, at, 0), jnp.moveaxis(begun.at[first].set(row), at, 0)
        return jnp.moveaxis(lax.scan(step, start, rows, reverse=reverse)[1], 0, at)

    tame = _is_tame(found) & jnp.all(jnp.isfinite(decay[first]))
    return lax.cond(tame, lambda *_: found, loop, decay, begun, x[first], start)


def _step(decay: Any, x: Any, state: Any) -> Any:
    """Returns the next state. A product that overflows does so before x, maybe infinite, is added.

    A fused multiplication and addition would not notice.
    """
    carried = decay * state
    if is_differentiable(x.dtype) and not is_complex(x.dtype):
        carried = jnp.where(jnp.isinf(carried), jnp.sign(carried) * jnp.inf, carried)
    return carried + x


def _scan(decay: Any, x: Any, at: int, reverse: bool) -> Any:
    """Returns the products of the decays up to each place, and the states."""

    def join(first: Any, second: Any) -> Any:
        return first[0] * second[0], first[1] * second[0] + second[1]

    return lax.associative_scan(join, (decay, x), reverse=reverse, axis=at)


def _is_tame(states: Any) -> Any:
    """Whether nothing is lost: no state is NaN or large, as a product that overflows makes one."""
    return jnp.max(jnp.abs(states)) <= _LARGE


def _totals(machine: Machine, instruction: Instruction, inputs: Arrays) -> Sequence[Any]:
    """What the shard makes of a state before it: see `transfers`; of integers two numbers."""
    decay, x = _decay_and_x(instruction, inputs)
    at, reverse = way(instruction, 1)
    last = place(x.shape[at], -1, at, reverse)
    if not is_differentiable(x.dtype):
        through, states = _scan(decay, x, at, reverse)
        return states[last], through[last]

    def ends(decay: Any, offset: Any, largest: Any) -> Sequence[Any]:
        mantissa, exponent = product(*parted(decay), [at])
        up = mantissa if is_complex(x.dtype) else jnp.sign(mantissa) * jnp.inf
        return offset, mantissa, _code(exponent, largest, up, -up, exponent != exponent)

    def shrinking(decay: Any, x: Any) -> Sequence[Any]:
        """Decays up to 1, and x of which no sum is large."""
        offset = _total(decay, x, at, reverse)
        return ends(decay, offset, jnp.ones(offset.shape, jnp.int32))

    def growing(decay: Any, x: Any) -> Sequence[Any]:
        through, states = _scan(decay, x, at, reverse)

        def scan(decay: Any, x: Any) -> Sequence[Any]:
            size = jnp.maximum(jnp.max(jnp.abs(through), at), 1)
            return ends(decay, states[last], parted(size)[1])

        tame = _is_tame(states) & jnp.all(jnp.isfinite(through))
        return lax.cond(tame, scan, loop, decay, x)

    def loop(decay: Any, x: Any) -> Sequence[Any]:
        rows = jnp.moveaxis(decay, at, 0), jnp.moveaxis(x, at, 0)
        blank = jnp.zeros_like(rows[1][0])
        none = jnp.zeros(blank.shape, jnp.int32)
        start = (blank, blank + jnp.inf, blank - jnp.inf, blank + 0.5, none + 1, none + 1, none > 0)
        end, _ = lax.scan(_one_more, start, rows, reverse=reverse)
        offset, up, down, mantissa, exponent, largest, stops = end
        mantissa = jnp.where(jnp.isfinite(offset), mantissa, 0)
        return offset, mantissa, _code(exponent, largest, up, down, stops)

    small = jnp.max(jnp.abs(x)) <= _LARGE / x.shape[at]
    shrinks = (jnp.max(jnp.abs(decay)) <= 1) & small
    return lax.cond(shrinks, shrinking, growing, decay, x)


def _total(decay: Any, x: Any, at: int, reverse: bool) -> Any:
    """Returns the last state; neighbours are joined until one is left."""
    while x.shape[at] > 1:
        half, odd = divmod(x.shape[at], 2)
        pads = [(0, 0, 0)] * x.ndim
        pads[at] = (0, odd, 0) if reverse else (odd, 0, 0)
        sizes = (*x.shape[:at], half + odd, 2, *x.shape[at + 1 :])
        order = (1, 0) if reverse else (0, 1)
        (d, other), (y, z) = (
            [lax.index_in_dim(padded.reshape(sizes), i, at + 1, keepdims=False) for i in order]
            for padded in (
                lax.pad(v, jnp.asarray(fill, v.dtype), pads) for v, fill in ((decay, 1), (x, 0))
            )
        )
        decay, x = d * other, other * y + z
    return lax.index_in_dim(x, 0, at, keepdims=False)


def _one_more(carry: tuple[Any, ...], row: tuple[Any, ...]) -> tuple[Any, None]:
    """Adds a step to what a shard makes of a state."""
    (offset, up, down, mantissa, exponent, largest, stops), (decay, x) = carry, row
    after = _step(decay, x, offset)
    if not is_complex(x.dtype):
        leaves = ~jnp.isfinite(decay * offset) | (jnp.isfinite(x) & ~jnp.isfinite(after))
        new = (
            jnp.isfinite(offset)
            & (jnp.isinf(decay) | (jnp.isfinite(decay) & leaves))
            & (mantissa != 0)
        )
        stops = stops | new
    counts = jnp.isfinite(offset) & jnp.isfinite(decay) & ~stops
    offset = jnp.where(stops, offset, after)
    goes = jnp.isfinite(offset) & ~stops
    factor, power = multiply((mantissa, exponent), parted(decay))
    mantissa, exponent = jnp.where(goes, factor, mantissa), jnp.where(goes, power, exponent)
    largest = jnp.where(counts & (factor != 0), jnp.maximum(largest, power), largest)
    up, down = decay * up + x, decay * down + x
    return (offset, up, down, mantissa, exponent, largest, stops), None


def _code(exponent: Any, largest: Any, up: Any, down: Any, stops: Any) -> Any:
    up, down = (
        jnp.where(v == jnp.inf, transfers.UP, jnp.where(v == -jnp.inf, transfers.DOWN, 0))
        for v in (up, down)
    )
    limit = transfers.LIMIT
    exponent, largest = jnp.clip(exponent, -limit, limit), jnp.minimum(largest, limit)
    return transfers.pack(exponent, largest, up, down, stops).astype(jnp.int32)


def _after(state: Any, offset: Any, mantissa: Any, code: Any) -> Any:
    """Returns what a shard makes of a state."""
    exponent, largest, *infinite, stops = transfers.unpack(code)
    up, down = (
        jnp.where(v == transfers.UP, jnp.inf, jnp.where(v == transfers.DOWN, -jnp.inf, jnp.nan))
        for v in infinite
    )
    number, power = parted(state)
    value = scaled(number * mantissa, power + exponent) + offset
    most = jnp.finfo(state.dtype).maxexp
    leaves = ~jnp.isfinite(state) | ((state != 0) & (power + largest - 2 >= most))
    if is_complex(state.dtype):
        return jnp.where(leaves, jnp.nan, value)
    stopped = jnp.sign(value) * jnp.sign(mantissa)
    side = jnp.where(leaves, jnp.sign(state), stopped)
    infinite_state = jnp.where(side > 0, up, jnp.where(side < 0, down, jnp.nan))
    return jnp.where(leaves | (stops > 0), infinite_state, value).astype(state.dtype)


def _states_before(machine: Machine, instruction: Instruction, inputs: Arrays) -> Any:
    """Before each row the state, by what the rows up to there make of zero."""
    at, reverse = way(instruction, 0)
    rows = tuple(jnp.moveaxis(row, at, 0) for row in inputs)

    def step(state: Any, row: Sequence[Any]) -> tuple[Any, Any]:
        after = _after(state, *row) if len(row) == 3 else row[1] * state + row[0]
        return after, state

    found = lax.scan(step, jnp.zeros_like(rows[0][0]), rows, reverse=reverse)[1]
    return jnp.moveaxis(found, 0, at)


def _decay_and_x(instruction: Instruction, inputs: Arrays) -> tuple[Any, Any]:
    one, other = instruction.inputs[:2]
    order = [one.local.position(name) for name in other.local.names]
    return jnp.transpose(inputs[0], order), jnp.asarray(inputs[1])


EMITTERS: Mapping[str, Emitter] = {
    "linear_recurrence": _recurrence,
    "linear_recurrence_from": _recurrence,
    "recurrence_totals": _totals,
    "states_before": _states_before,
}
