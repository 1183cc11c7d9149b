"""Elementwise instructions: numpy and SciPy on aligned dims."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from scipy import special  # type: ignore[import-untyped]

from meshdsl.lowering.backends.arrange import NUMPY_NAMES
from meshdsl.lowering.backends.numpy.machine import Arrays, Emitter, Machine, align, wide
from meshdsl.lowering.program import Instruction
from meshdsl.tensors.dtypes import is_differentiable, is_integer


def elementwise(function: Callable[..., np.ndarray]) -> Emitter:
    """Returns the emitter of a function of arrays that broadcast by position."""

    def emit(machine: Machine, instruction: Instruction, inputs: Arrays) -> np.ndarray:
        (out,) = instruction.outputs
        aligned = [
            wide(align(a, v.local, out.local))
            for a, v in zip(inputs, instruction.inputs, strict=True)
        ]
        result = np.asarray(function(*aligned)).astype(out.dtype)
        return np.broadcast_to(result, (machine.mesh.size, *out.local.sizes))

    return emit


def _power(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    if y.dtype.kind != "i":
        return np.power(x, y)
    return np.where(y < 0, 0, np.power(x, np.maximum(y, 0)))


def _cast(machine: Machine, instruction: Instruction, inputs: Arrays) -> np.ndarray:
    (x,), dtype = inputs, instruction.outputs[0].dtype
    if not (is_integer(dtype) and is_differentiable(x.dtype)):
        return x.astype(dtype)
    limits, x = np.iinfo(dtype), wide(x)
    above, below = x >= 2.0**limits.bits / (2 if limits.min else 1), x <= limits.min
    result = np.where(above | below | np.isnan(x), 0, x).astype(dtype)
    return np.where(above, dtype.type(limits.max), np.where(below, dtype.type(limits.min), result))


def _complex(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    result = np.empty(np.broadcast_shapes(x.shape, y.shape), np.result_type(x, np.complex64))
    result.real, result.imag = x, y
    return result


EMITTERS: Mapping[str, Emitter] = {
    **{name: elementwise(getattr(np, name)) for name in NUMPY_NAMES},
    "round": elementwise(np.rint),
    "rsqrt": elementwise(lambda x: 1 / np.sqrt(x)),
    "sigmoid": elementwise(special.expit),
    "remainder": elementwise(np.remainder),
    "floor_divide": elementwise(np.floor_divide),
    "power": elementwise(_power),
    "select": elementwise(np.where),
    "cast": _cast,
    "real": elementwise(np.real),
    "imag": elementwise(np.imag),
    "conj": elementwise(np.conj),
    "complex": elementwise(_complex),
}
