"""Cumulative instructions along one dim of a shard."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from meshdsl.dtypes import identity
from meshdsl.lowering.backends.numpy.machine import Arrays, Emitter, Machine, align, wide
from meshdsl.lowering.backends.numpy.scaling import parted, scaled
from meshdsl.lowering.program import Instruction


def _shifted(x: np.ndarray, fill: float) -> np.ndarray:
    """Moves everything one place on along the first dim, whose first place gets `fill`."""
    return np.concatenate([np.full_like(x[:1], fill), x[:-1]])


def _cumulative(function: Any, kind: str) -> Emitter:
    def emit(machine: Machine, instruction: Instruction, inputs: Arrays) -> np.ndarray:
        (x,), params = inputs, instruction.params
        at = instruction.inputs[0].local.position(params["dim"]) + 1
        rows = np.moveaxis(wide(x), at, 0)[:: -1 if params["reverse"] else 1]
        found = function.accumulate(rows, axis=0, dtype=rows.dtype)
        if params["exclusive"]:
            found = _shifted(found, identity(kind, x.dtype))
        found = found[:: -1 if params["reverse"] else 1]
        return np.moveaxis(found, 0, at).astype(x.dtype)

    return emit


def _product_from(machine: Machine, instruction: Instruction, inputs: Arrays) -> np.ndarray:
    """The product of a start and all elements up to a place."""
    (x, start), params = inputs, instruction.params
    rows, back = _rows(instruction, 0, x)
    found = np.multiply.accumulate(np.concatenate([start[None], rows]), axis=0, dtype=x.dtype)
    return back(found[:-1] if params["exclusive"] else found[1:])


def _recurrence(
    machine: Machine, instruction: Instruction, inputs: Arrays
) -> tuple[np.ndarray, np.ndarray]:
    start = np.zeros_like(_rows(instruction, 1, inputs[1])[0][0])
    return _states(instruction, inputs, start)


def _recurrence_from(machine: Machine, instruction: Instruction, inputs: Arrays) -> np.ndarray:
    return _states(instruction, inputs, inputs[2])[0]


def _states(
    instruction: Instruction, inputs: Arrays, state: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    one, other = (value.local for value in instruction.inputs[:2])
    decay, _ = _rows(instruction, 1, align(inputs[0], one, other))
    x, back = _rows(instruction, 1, inputs[1])
    states, exclusive = np.empty_like(x), instruction.params["exclusive"]
    for place in range(len(x)):
        after = decay[place] * state + x[place]
        states[place] = state if exclusive else after
        state = after
    return back(states), state


def _rows(
    instruction: Instruction, number: int, x: np.ndarray
) -> tuple[np.ndarray, Callable[[np.ndarray], np.ndarray]]:
    """Returns an operand's rows along the dim, in the order of the steps, and what undoes that."""
    at = instruction.inputs[number].local.position(instruction.params["dim"]) + 1
    step = -1 if instruction.params["reverse"] else 1
    return np.moveaxis(x, at, 0)[::step], lambda rows: np.moveaxis(rows[::step], 0, at)


def _products_before(machine: Machine, instruction: Instruction, inputs: Arrays) -> np.ndarray:
    """Before each row of mantissas and exponents the product of those up to there."""
    ones = np.ones_like(inputs[0])
    return _before(instruction, [np.negative(np.zeros_like(ones)), *inputs], ones)


def _states_before(machine: Machine, instruction: Instruction, inputs: Arrays) -> np.ndarray:
    """Before each row the state; it is turned into `through` times it plus `last`."""
    return _before(instruction, inputs, np.zeros_like(inputs[0]))


def _before(instruction: Instruction, inputs: Arrays, start: np.ndarray) -> np.ndarray:
    last, through, *exponents = (_rows(instruction, 0, x)[0] for x in inputs)
    rows, back = _rows(instruction, 0, start)
    found = np.array(rows)
    for place in range(len(found) - 1):
        state = found[place]
        if not exponents:
            found[place + 1] = through[place] * state + last[place]
            continue
        mantissa, exponent = parted(state)
        carried = scaled(through[place] * mantissa, exponents[0][place] + exponent)
        found[place + 1] = carried + last[place]
    return back(found)


EMITTERS: Mapping[str, Emitter] = {
    "cumsum": _cumulative(np.add, "sum"),
    "cumprod": _cumulative(np.multiply, "prod"),
    "cumprod_from": _product_from,
    "cummax": _cumulative(np.maximum, "max"),
    "cummin": _cumulative(np.minimum, "min"),
    "linear_recurrence": _recurrence,
    "linear_recurrence_from": _recurrence_from,
    "products_before": _products_before,
    "states_before": _states_before,
}
