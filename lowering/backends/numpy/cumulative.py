"""Cumulative instructions along one dim of a shard."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from meshdsl.dtypes import identity
from meshdsl.lowering.backends.numpy.machine import Arrays, Emitter, Machine, align, wide
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


def _recurrence(
    machine: Machine, instruction: Instruction, inputs: Arrays
) -> tuple[np.ndarray, np.ndarray]:
    params, (one, other) = instruction.params, instruction.inputs
    at = other.local.position(params["dim"]) + 1
    step = -1 if params["reverse"] else 1
    decay = np.moveaxis(align(inputs[0], one.local, other.local), at, 0)[::step]
    x = np.moveaxis(inputs[1], at, 0)[::step]
    states = np.empty_like(x)
    state = np.zeros_like(x[0])
    for place in range(len(x)):
        state = states[place] = decay[place] * state + x[place]
    if params["exclusive"]:
        states = _shifted(states, 0)
    return np.moveaxis(states[::step], 0, at), state


EMITTERS: Mapping[str, Emitter] = {
    "cumsum": _cumulative(np.add, "sum"),
    "cumprod": _cumulative(np.multiply, "prod"),
    "cummax": _cumulative(np.maximum, "max"),
    "cummin": _cumulative(np.minimum, "min"),
    "linear_recurrence": _recurrence,
}
