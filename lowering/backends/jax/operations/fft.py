"""Fourier transforms along one dim."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
from jax import lax

from meshdsl.lowering.backends.jax.machine import Arrays, Emitter, Machine
from meshdsl.lowering.parameters import AlongDim, HalfSpectrum, parameters_of
from meshdsl.lowering.program import Instruction


def _transform(function: Callable[[Instruction, Any], Any]) -> Emitter:
    """Returns the emitter of a transform along the last axis of a matrix."""

    def emit(machine: Machine, instruction: Instruction, inputs: Arrays) -> Any:
        at = instruction.inputs[0].local.position(parameters_of(instruction, AlongDim)["dim"])
        x = jnp.moveaxis(inputs[0], at, -1)
        # The barriers fix a row-major order in memory. XLA:CPU may choose another order, which its
        # own transform does not support.
        row = lax.optimization_barrier(x.reshape(-1))
        result = function(instruction, row.reshape(-1, x.shape[-1]))
        size = result.shape[-1]
        result = lax.optimization_barrier(result.reshape(-1))
        result = result.reshape(*x.shape[:-1], size)
        return jnp.moveaxis(result, -1, at)

    return emit


def _into(instruction: Instruction) -> int:
    return parameters_of(instruction, HalfSpectrum)["into"].size


EMITTERS: Mapping[str, Emitter] = {
    "fft": _transform(lambda instruction, x: jnp.fft.fft(x)),
    "ifft": _transform(lambda instruction, x: jnp.fft.ifft(x)),
    "rfft": _transform(lambda instruction, x: jnp.fft.rfft(x)),
    "irfft": _transform(lambda instruction, x: jnp.fft.irfft(x, _into(instruction))),
}
