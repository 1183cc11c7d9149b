"""What sliding windows see, reduced; and compared with."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import numpy as np

from meshdsl.lowering.backends.common.arrange import align
from meshdsl.lowering.backends.numpy import namespace as xp
from meshdsl.lowering.backends.numpy.machine import Arrays, Emitter, Machine
from meshdsl.lowering.backends.numpy.namespace import wide
from meshdsl.lowering.backends.numpy.operations.convolution import met
from meshdsl.lowering.parameters import Pool, WindowMatch, parameters_of
from meshdsl.lowering.program import Instruction
from meshdsl.tensors.dims import Shape
from meshdsl.tensors.dtypes import identity


def _seen(instruction: Instruction, number: int, array: np.ndarray, fill: float) -> np.ndarray:
    """Lays an operand as the result, with what each window sees in one more dim at the end."""
    have, out = instruction.inputs[number].local, instruction.outputs[0].local
    array = align(xp, array, have, Shape(have.get(name) for name in out.names))
    params = parameters_of(instruction, Pool)
    for slide, size in zip(params["slides"], params["sizes"], strict=True):
        at = out.position(slide.out) + 1
        array = np.moveaxis(met(array, at, slide, out[at - 1].size, size, fill), at + 1, -1)
    return array.reshape(*array.shape[: 1 + len(out)], -1)


def _reduction(function: Any, fill: Any) -> Emitter:
    def emit(machine: Machine, instruction: Instruction, inputs: Arrays) -> np.ndarray:
        x = wide(inputs[0])
        found = _seen(instruction, 0, x, fill(x.dtype))
        return function.reduce(found, axis=-1, dtype=x.dtype).astype(inputs[0].dtype)

    return emit


def _match(machine: Machine, instruction: Instruction, inputs: Arrays) -> np.ndarray:
    (out,), params = instruction.outputs, parameters_of(instruction, WindowMatch)
    here = align(xp, inputs[0], instruction.inputs[0].local, out.local)[..., None]
    there = _seen(instruction, 1, inputs[1], np.nan)
    highest, other = (here, there) if params["extreme"] == 0 else (there, here)
    slack = np.asarray(params["slack"], out.dtype) * np.abs(highest)
    equal = (other >= highest - slack) | (other == highest)
    amount = _seen(instruction, 2, inputs[2], 0) if inputs[2:] else np.ones((), out.dtype)
    found = wide(np.where(equal, amount, np.zeros((), out.dtype)))
    return found.sum(axis=-1, dtype=found.dtype).astype(out.dtype)


EMITTERS: Mapping[str, Emitter] = {
    "window_sum": _reduction(np.add, functools.partial(identity, "sum")),
    "window_max": _reduction(np.maximum, functools.partial(identity, "max")),
    "window_match": _match,
}
