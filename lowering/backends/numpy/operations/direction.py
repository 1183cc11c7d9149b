"""The direction of a cumulative instruction along an axis of a shard."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from meshdsl.lowering.parameters import Before, parameters_of
from meshdsl.lowering.program import Instruction


def in_rows(
    instruction: Instruction, number: int, x: np.ndarray
) -> tuple[np.ndarray, Callable[[np.ndarray], np.ndarray]]:
    """Returns an operand's rows along the dim, in the order of the steps, and the inverse."""
    params = parameters_of(instruction, Before)
    at = instruction.inputs[number].local.position(params["dim"]) + 1
    step = -1 if params["reverse"] else 1
    return np.moveaxis(x, at, 0)[::step], lambda rows: np.moveaxis(rows[::step], 0, at)
