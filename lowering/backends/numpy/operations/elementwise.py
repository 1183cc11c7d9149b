"""Elementwise instructions: functions of numpy and SciPy; the table has those of other names."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import ml_dtypes
import numpy as np
from scipy import special  # type: ignore[import-untyped]

from meshdsl.lowering.backends.common.elementwise import elementwise, functions
from meshdsl.lowering.backends.numpy.machine import Arrays, Emitter, Machine
from meshdsl.lowering.backends.numpy.namespace import wide
from meshdsl.lowering.program import Instruction
from meshdsl.tensors.dtypes import is_differentiable, is_float8, is_integer


def _accurate(function: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    """Returns a function that computes in a dtype that SciPy supports; its emitter rounds."""
    return lambda *arrays: function(*map(wide, arrays))


def _power(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    if y.dtype.kind != "i":
        return np.power(x, y)
    return np.where(y < 0, 0, np.power(x, np.maximum(y, 0)))


def _cast(machine: Machine, instruction: Instruction, inputs: Arrays) -> np.ndarray:
    """Converts numbers; floats outside of an integer dtype become its limits, and NaN becomes 0."""
    (x,), dtype = inputs, instruction.outputs[0].dtype
    if not (is_integer(dtype) and (is_differentiable(x.dtype) or is_float8(x.dtype))):
        return x.astype(dtype)
    limits, x = np.iinfo(dtype), wide(x)
    above, below = x >= 2.0**limits.bits / (2 if limits.min else 1), x <= limits.min
    result = np.where(above | below | np.isnan(x), 0, x).astype(dtype)
    return np.where(above, dtype.type(limits.max), np.where(below, dtype.type(limits.min), result))


def _power_of_two(x: np.ndarray) -> np.ndarray:
    bits = np.dtype(f"u{x.itemsize}").type
    exponent = ml_dtypes.finfo(x.dtype).maxexp * 2 - 1 << ml_dtypes.finfo(x.dtype).nmant
    return (x.view(bits) & bits(exponent)).view(x.dtype)


def _complex(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    result = np.empty(np.broadcast_shapes(x.shape, y.shape), np.result_type(x, np.complex64))
    result.real, result.imag = x, y
    return result


_OWN: Mapping[str, Callable[..., np.ndarray]] = {
    "bessel_i0e": special.i0e,
    "bessel_i1e": special.i1e,
    "bit_and": np.bitwise_and,
    "bit_not": np.bitwise_not,
    "bit_or": np.bitwise_or,
    "bit_xor": np.bitwise_xor,
    "complex": _complex,
    "digamma": lambda x: np.where(x == 0, np.nan, special.digamma(x)),
    "erf_inv": special.erfinv,
    "lgamma": special.gammaln,
    "population_count": lambda x: np.bitwise_count(x.view(f"u{x.itemsize}")),
    "power": _power,
    "power_of_two": _power_of_two,
    "round": np.rint,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "select": np.where,
    "shift_left": np.left_shift,
    "shift_right": np.right_shift,
    "sigmoid": special.expit,
}

EMITTERS: Mapping[str, Emitter] = {
    name: elementwise(_accurate(function))
    for name, function in functions(_OWN, [np, special]).items()
} | {"cast": _cast}
