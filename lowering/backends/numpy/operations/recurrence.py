"""Linear recurrences along one dim of a shard: h[i] = decay[i] * h[i-1] + x[i], step by step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from meshdsl.lowering.backends import recurrence_codes as transfers
from meshdsl.lowering.backends.common.arrange import align
from meshdsl.lowering.backends.numpy import namespace as xp
from meshdsl.lowering.backends.numpy.machine import Arrays, Emitter, Machine
from meshdsl.lowering.backends.numpy.operations.direction import in_rows
from meshdsl.lowering.backends.numpy.operations.scaling import frexp, scaled
from meshdsl.lowering.parameters import Cumulative, parameters_of
from meshdsl.lowering.program import Instruction
from meshdsl.tensors.dtypes import is_differentiable


def _recurrence(machine: Machine, instruction: Instruction, inputs: Arrays) -> np.ndarray:
    """Returns the states; the state before the first step is the start, or zero."""
    decay, x = _decay_and_x(instruction, inputs)
    exclusive = parameters_of(instruction, Cumulative)["exclusive"]
    _, back = in_rows(instruction, 1, inputs[1])
    state = inputs[2] if len(inputs) > 2 else np.zeros_like(x[0])
    states = np.empty_like(x)
    for step in range(len(x)):
        after = decay[step] * state + x[step]
        states[step] = state if exclusive else after
        state = after
    return back(states)


def _totals(machine: Machine, instruction: Instruction, inputs: Arrays) -> Sequence[np.ndarray]:
    """Returns the shard's transfer: see `transfers`; for integers, offset and factor."""
    decays, xs = _decay_and_x(instruction, inputs)
    offset, factor = np.zeros_like(xs[0]), np.ones_like(xs[0])
    if not is_differentiable(xs.dtype):
        for decay, x in zip(decays, xs, strict=True):
            offset, factor = decay * offset + x, decay * factor
        return offset, factor
    is_complex = np.iscomplexobj(xs)
    up, down = offset + np.inf, offset - np.inf
    mantissa, exponent = frexp(factor)
    largest, stops = exponent, np.zeros(offset.shape, bool)
    for decay, x in zip(decays, xs, strict=True):
        after = decay * offset + x
        if not is_complex:
            overflows = ~np.isfinite(decay * offset) | (np.isfinite(x) & ~np.isfinite(after))
            # Here is the first value that is not finite, and its sign depends on the state before.
            starts = (
                np.isfinite(offset)
                & (np.isinf(decay) | (np.isfinite(decay) & overflows))
                & (mantissa != 0)
            )
            stops = stops | starts
        counts = np.isfinite(offset) & np.isfinite(decay) & ~stops
        offset = np.where(stops, offset, after)
        is_finite = np.isfinite(offset) & ~stops
        decay_mantissa, decay_exponent = frexp(decay)
        factor, more = frexp(mantissa * decay_mantissa)
        power = exponent + decay_exponent + more
        mantissa = np.where(is_finite, factor, mantissa)
        exponent = np.where(is_finite, power, exponent)
        largest = np.where(counts & (factor != 0), np.maximum(largest, power), largest)
        up, down = decay * up + x, decay * down + x
    mantissa = np.where(np.isfinite(offset), mantissa, np.zeros_like(mantissa))
    up, down = (
        np.where(v == np.inf, transfers.UP, np.where(v == -np.inf, transfers.DOWN, 0))
        for v in (up, down)
    )
    exponent, largest = (np.clip(v, -transfers.LIMIT, transfers.LIMIT) for v in (exponent, largest))
    return offset, mantissa, transfers.pack(exponent, largest, up, down, stops).astype(np.int32)


def _after(
    state: np.ndarray, offset: np.ndarray, mantissa: np.ndarray, code: np.ndarray
) -> np.ndarray:
    """Returns the last state of a shard, from the state before it and the shard's transfer."""
    exponent, largest, *infinite, stops = transfers.unpack(code)
    up, down = (
        np.where(v == transfers.UP, np.inf, np.where(v == transfers.DOWN, -np.inf, np.nan))
        for v in infinite
    )
    number, power = frexp(state)
    value = scaled(number * mantissa, power + exponent) + offset
    limit = np.finfo(state.dtype).maxexp
    overflows = ~np.isfinite(state) | ((state != 0) & (power + largest - 2 >= limit))
    if np.iscomplexobj(state):
        return np.where(overflows, np.nan, value).astype(state.dtype)
    stopped = np.sign(value) * np.sign(mantissa)
    side = np.where(overflows, np.sign(state), stopped)
    infinite_state = np.where(side > 0, up, np.where(side < 0, down, np.nan))
    return np.where(overflows | (stops > 0), infinite_state, value).astype(state.dtype)


def _states_before(machine: Machine, instruction: Instruction, inputs: Arrays) -> np.ndarray:
    """Returns the state before each row, where the first is zero and each row is a transfer."""
    rows = [in_rows(instruction, 0, x)[0] for x in inputs]
    states, state = np.empty_like(rows[0]), np.zeros_like(rows[0][0])
    for step, row in enumerate(zip(*rows, strict=True)):
        states[step] = state
        state = _after(state, *row) if len(row) == 3 else row[1] * state + row[0]
    return in_rows(instruction, 0, inputs[0])[1](states)


def _decay_and_x(instruction: Instruction, inputs: Arrays) -> tuple[np.ndarray, np.ndarray]:
    """Returns the decays and x with the same dims, as rows in the order of the steps."""
    decay_dims, x_dims = (value.local for value in instruction.inputs[:2])
    decay, _ = in_rows(instruction, 1, align(xp, inputs[0], decay_dims, x_dims))
    return decay, in_rows(instruction, 1, inputs[1])[0]


EMITTERS: Mapping[str, Emitter] = {
    "linear_recurrence": _recurrence,
    "linear_recurrence_from": _recurrence,
    "recurrence_totals": _totals,
    "states_before": _states_before,
}
