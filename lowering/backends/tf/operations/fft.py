"""Fourier transforms along one dim."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import tensorflow as tf

from meshdsl.lowering.backends.tf import namespace as xp
from meshdsl.lowering.backends.tf.machine import Arrays, Emitter, Machine
from meshdsl.lowering.parameters import AlongDim, HalfSpectrum, parameters_of
from meshdsl.lowering.program import Instruction


def _transform(function: Callable[[Instruction, tf.Tensor], tf.Tensor]) -> Emitter:
    """Returns the emitter of a transform along the last axis."""

    def emit(machine: Machine, instruction: Instruction, inputs: Arrays) -> tf.Tensor:
        at = instruction.inputs[0].local.position(parameters_of(instruction, AlongDim)["dim"])
        # For real numbers that were cast to complex, TensorFlow's compiler would replace the
        # transform by that of real numbers, which has fewer results. The barrier hides the cast.
        (x,) = machine.links.barrier(inputs)
        return xp.moveaxis(function(instruction, xp.moveaxis(x, at, -1)), -1, at)

    return emit


def _irfft(instruction: Instruction, x: tf.Tensor) -> tf.Tensor:
    return tf.signal.irfft(x, [parameters_of(instruction, HalfSpectrum)["into"].size])


EMITTERS: Mapping[str, Emitter] = {
    "fft": _transform(lambda instruction, x: tf.signal.fft(x)),
    "ifft": _transform(lambda instruction, x: tf.signal.ifft(x)),
    "rfft": _transform(lambda instruction, x: tf.signal.rfft(x, [x.shape[-1]])),
    "irfft": _transform(_irfft),
}
