"""Reductions over named dims of one shard."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from meshdsl.lowering.backends.numpy.machine import Arrays, Emitter, Machine
from meshdsl.lowering.backends.numpy.namespace import wide
from meshdsl.lowering.backends.numpy.operations.scaling import frexp, out_of_range, product, scaled
from meshdsl.lowering.parameters import AlongDim, Reduction, parameters_of
from meshdsl.lowering.program import Instruction


def _reduction(function: Any) -> Emitter:
    """Returns the emitter of a reduction over some dims."""

    def emit(machine: Machine, instruction: Instruction, inputs: Arrays) -> np.ndarray:
        local = instruction.inputs[0].local
        at = tuple(local.position(n) + 1 for n in parameters_of(instruction, Reduction)["over"])
        x = wide(inputs[0])
        return function.reduce(x, axis=at, dtype=x.dtype).astype(instruction.outputs[0].dtype)

    return emit


def _prod(machine: Machine, instruction: Instruction, inputs: Arrays) -> np.ndarray:
    """Returns products; from mantissas and exponents if a partial product may leave the range."""
    x, local = inputs[0], instruction.inputs[0].local
    at = tuple(local.position(n) + 1 for n in parameters_of(instruction, Reduction)["over"])
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        result = np.multiply.reduce(x, axis=at, dtype=x.dtype)
    if not out_of_range(result):
        return result
    rows = np.moveaxis(x, at, range(len(at)))
    return scaled(*product(*frexp(rows.reshape(-1, *rows.shape[len(at) :]))))


def _arg(function: Any) -> Emitter:
    """Returns the emitter of argmax or argmin along a dim."""

    def emit(machine: Machine, instruction: Instruction, inputs: Arrays) -> np.ndarray:
        at = instruction.inputs[0].local.position(parameters_of(instruction, AlongDim)["dim"]) + 1
        return function(wide(inputs[0]), axis=at).astype(np.int32)

    return emit


EMITTERS: Mapping[str, Emitter] = {
    "sum": _reduction(np.add),
    "prod": _prod,
    "argmax": _arg(np.argmax),
    "argmin": _arg(np.argmin),
    "max": _reduction(np.maximum),
    "min": _reduction(np.minimum),
}
