"""Fourier transforms along one dim."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from meshdsl.lowering.backends.numpy.machine import Arrays, Emitter, Machine
from meshdsl.lowering.parameters import AlongDim, HalfSpectrum, parameters_of
from meshdsl.lowering.program import Instruction


def _transform(function: Callable[[Instruction, np.ndarray, int], np.ndarray]) -> Emitter:
    """Returns the emitter of a transform along one axis."""

    def emit(machine: Machine, instruction: Instruction, inputs: Arrays) -> np.ndarray:
        at = instruction.inputs[0].local.position(parameters_of(instruction, AlongDim)["dim"]) + 1
        return function(instruction, inputs[0], at).astype(instruction.outputs[0].dtype)

    return emit


def _irfft(instruction: Instruction, x: np.ndarray, at: int) -> np.ndarray:
    return np.fft.irfft(x, parameters_of(instruction, HalfSpectrum)["into"].size, at)


EMITTERS: Mapping[str, Emitter] = {
    "fft": _transform(lambda instruction, x, at: np.fft.fft(x, axis=at)),
    "ifft": _transform(lambda instruction, x, at: np.fft.ifft(x, axis=at)),
    "rfft": _transform(lambda instruction, x, at: np.fft.rfft(x, axis=at)),
    "irfft": _transform(_irfft),
}
