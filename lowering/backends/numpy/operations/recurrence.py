"""Linear recurrences along one dim of a shard: h[i] = decay[i] * h[i-1] + x[i], step by step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from meshdsl.lowering.backends import recurrence_codes as transfers
from meshdsl.lowering.backends.common.arrange import align
from meshdsl.lowering.backends.numpy import namespace as xp
from meshdsl.lowering.backends.numpy.machine import Arrays, Emitter, Machine
from meshdsl.lowering.backends.numpy.operations.direction import in_rows
from meshdsl.lowering.backends.numpy.operations.scaling import parted, scaled
from meshdsl.lowering.parameters import Cumulative, parameters_of
from meshdsl.lowering.program import Instruction
from meshdsl.tensors.dtypes import is_differentiable


def _recurrence(machine: Machine, instruction: Instruction, inputs: Arrays) -> np.ndarray:
    """The states, from a start or from zero on."""
    decay, x = _decay_and_x(instruction, inputs)
    exclusive = parameters_of(instruction, Cumulative)["exclusive"]
    _, back = in_rows(instruction, 1, inputs[1])
    state = inputs[2] if len(inputs) > 2 else np.zeros_like(x[0])
    states = np.empty_like(x)
    for place in range(len(x)):
        after = decay[place] * state + x[place]
        states[place] = state if exclusive else after
        state = after
    return back(states)


def _totals(machine: Machine, instruction: Instruction, inputs: Arrays) -> Sequence[np.ndarray]:
    """What the shard makes of a state before it: see `transfers`; of integers two numbers."""
    decays, xs = _decay_and_x(instruction, inputs)
    offset, factor = np.zeros_like(xs[0]), np.ones_like(xs[0])
    if not is_differentiable(xs.dtype):
        for decay, x in zip(decays, xs, strict=True):
            offset, factor = decay * offset + x, decay * factor
        return offset, factor
    is_complex = np.iscomplexobj(xs)
    up, down = offset + np.inf, offset - np.inf
    mantissa, exponent = parted(factor)
    largest, stops = exponent, np.zeros(offset.shape, bool)
    for decay, x in zip(decays, xs, strict=True):
        after = decay * offset + x
        if not is_complex:
            leaves = ~np.isfinite(decay * offset) | (np.isfinite(x) & ~np.isfinite(after))
            new = (
                np.isfinite(offset)
                & (np.isinf(decay) | (np.isfinite(decay) & leaves))
                & (mantissa != 0)
            )
            stops = stops | new
        counts = np.isfinite(offset) & np.isfinite(decay) & ~stops
        offset = np.where(stops, offset, after)
        goes = np.isfinite(offset) & ~stops
        one, other = parted(decay)
        factor, more = parted(mantissa * one)
        power = exponent + other + more
        mantissa, exponent = np.where(goes, factor, mantissa), np.where(goes, power, exponent)
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
    """Returns what a shard makes of a state."""
    exponent, largest, *infinite, stops = transfers.unpack(code)
    up, down = (
        np.where(v == transfers.UP, np.inf, np.where(v == transfers.DOWN, -np.inf, np.nan))
        for v in infinite
    )
    number, power = parted(state)
    value = scaled(number * mantissa, power + exponent) + offset
    most = np.finfo(state.dtype).maxexp
    leaves = ~np.isfinite(state) | ((state != 0) & (power + largest - 2 >= most))
    if np.iscomplexobj(state):
        return np.where(leaves, np.nan, value).astype(state.dtype)
    stopped = np.sign(value) * np.sign(mantissa)
    side = np.where(leaves, np.sign(state), stopped)
    infinite_state = np.where(side > 0, up, np.where(side < 0, down, np.nan))
    return np.where(leaves | (stops > 0), infinite_state, value).astype(state.dtype)


def _states_before(machine: Machine, instruction: Instruction, inputs: Arrays) -> np.ndarray:
    """Before each row the state, by what the rows up to there make of zero."""
    rows = [in_rows(instruction, 0, x)[0] for x in inputs]
    found, state = np.empty_like(rows[0]), np.zeros_like(rows[0][0])
    for place, row in enumerate(zip(*rows, strict=True)):
        found[place] = state
        state = _after(state, *row) if len(row) == 3 else row[1] * state + row[0]
    return in_rows(instruction, 0, inputs[0])[1](found)


def _decay_and_x(instruction: Instruction, inputs: Arrays) -> tuple[np.ndarray, np.ndarray]:
    one, other = (value.local for value in instruction.inputs[:2])
    decay, _ = in_rows(instruction, 1, align(xp, inputs[0], one, other))
    return decay, in_rows(instruction, 1, inputs[1])[0]


EMITTERS: Mapping[str, Emitter] = {
    "linear_recurrence": _recurrence,
    "linear_recurrence_from": _recurrence,
    "recurrence_totals": _totals,
    "states_before": _states_before,
}
