"""Pooling: reductions over sliding windows, and the elements that equal their maximum."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import numpy as np

from meshdsl.lowering.backends.common.arrange import align
from meshdsl.lowering.backends.numpy import namespace as xp
from meshdsl.lowering.backends.numpy.machine import Arrays, Emitter, Machine
from meshdsl.lowering.backends.numpy.namespace import wide
from meshdsl.lowering.backends.numpy.operations.convolution import windows_of
from meshdsl.lowering.parameters import Pool, WindowMatch, parameters_of
from meshdsl.lowering.program import Instruction
from meshdsl.tensors.dims import Shape
from meshdsl.tensors.dtypes import identity


def _windows(instruction: Instruction, number: int, array: np.ndarray, fill: float) -> np.ndarray:
    """Returns the elements in each window of an operand: [devices, *dims of the result, window]."""
    have, out = instruction.inputs[number].local, instruction.outputs[0].local
    array = align(xp, array, have, Shape(have.get(name) for name in out.names))
    params = parameters_of(instruction, Pool)
    for slide, size in zip(params["slides"], params["sizes"], strict=True):
        at = out.position(slide.out) + 1
        array = np.moveaxis(windows_of(array, at, slide, out[at - 1].size, size, fill), at + 1, -1)
    return array.reshape(*array.shape[: 1 + len(out)], -1)


def _reduction(function: Any, fill: Any) -> Emitter:
    """Returns the emitter of a reduction of windows; `fill` is its neutral element."""

    def emit(machine: Machine, instruction: Instruction, inputs: Arrays) -> np.ndarray:
        x = wide(inputs[0])
        windows = _windows(instruction, 0, x, fill(x.dtype))
        return function.reduce(windows, axis=-1, dtype=x.dtype).astype(inputs[0].dtype)

    return emit


def _match(machine: Machine, instruction: Instruction, inputs: Arrays) -> np.ndarray:
    """Sums over each window the amounts, or ones, where an element equals the maximum.

    The parameter `extreme` says which operand has the maxima: 0: the first, else the second.
    """
    (out,), params = instruction.outputs, parameters_of(instruction, WindowMatch)
    left = align(xp, inputs[0], instruction.inputs[0].local, out.local)[..., None]
    right = _windows(instruction, 1, inputs[1], np.nan)
    highest, candidate = (left, right) if params["extreme"] == 0 else (right, left)
    slack = np.asarray(params["slack"], out.dtype) * np.abs(highest)
    equal = (candidate >= highest - slack) | (candidate == highest)
    amount = _windows(instruction, 2, inputs[2], 0) if inputs[2:] else np.ones((), out.dtype)
    amounts = wide(np.where(equal, amount, np.zeros((), out.dtype)))
    return amounts.sum(axis=-1, dtype=amounts.dtype).astype(out.dtype)


EMITTERS: Mapping[str, Emitter] = {
    "window_sum": _reduction(np.add, functools.partial(identity, "sum")),
    "window_max": _reduction(np.maximum, functools.partial(identity, "max")),
    "window_match": _match,
}
