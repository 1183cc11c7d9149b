"""Numbers as a mantissa and an exponent, so that products do not overflow or underflow.

A mantissa is 0, infinite, NaN, or has a magnitude in [0.5, 1). A complex number has one exponent,
that of the larger of its parts. Exponents are s32; those of 0, inf and NaN are arbitrary.

Dtypes are float32, float64, complex64 and complex128: half precision is multiplied in float32. The
sum of a dim's exponents must fit in s32: 14 million factors at the limits of float32, 2 million at
those of float64.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from meshdsl.lowering.backends.numpy.machine import Arrays, Emitter, Machine
from meshdsl.lowering.parameters import Reduction, parameters_of
from meshdsl.lowering.program import Instruction

_BLOCK = 32  # mantissas whose product, 2**-32 at least, is normal in float32 and wider


def frexp(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the mantissas and exponents of numbers, also of complex ones."""
    size = np.maximum(abs(x.real), abs(x.imag)) if np.iscomplexobj(x) else abs(x)
    assert size.dtype.itemsize >= 4, "half precision is multiplied in float32"
    exponent = np.where(np.isfinite(size), np.frexp(size)[1], 0).astype(np.int32)
    return scaled(x, -exponent), exponent


def scaled(x: np.ndarray, exponent: np.ndarray) -> np.ndarray:
    """Returns x times 2**exponent."""
    with np.errstate(over="ignore", under="ignore"):
        if not np.iscomplexobj(x):
            return np.ldexp(x, exponent)
        result = np.empty(np.broadcast_shapes(x.shape, exponent.shape), x.dtype)
        result.real, result.imag = np.ldexp(x.real, exponent), np.ldexp(x.imag, exponent)
        return result


def products(mantissa: np.ndarray, exponent: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the mantissas and exponents of the products of all rows up to each."""
    mantissas, exponents = np.empty_like(mantissa), np.empty_like(exponent)
    number, power = np.ones_like(mantissa[:1]), np.zeros_like(exponent[:1])
    with np.errstate(invalid="ignore"):
        for index in range(len(mantissa)):
            row = slice(index, index + 1)
            number, more = frexp(number * mantissa[row])
            power = power + exponent[row] + more
            mantissas[row], exponents[row] = number, power
    return mantissas, exponents


def product(mantissa: np.ndarray, exponent: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the mantissa and the exponent of the product of all rows."""
    number, total = np.ones_like(mantissa[0]), exponent.sum(0, dtype=np.int32)
    with np.errstate(invalid="ignore"):
        for at in range(0, len(mantissa), _BLOCK):
            number, more = frexp(number * np.multiply.reduce(mantissa[at : at + _BLOCK]))
            total = total + more
    return number, total


def out_of_range(products: np.ndarray) -> bool:
    """Whether any product may have left the range: it is not finite, or not a normal number."""
    if products.dtype.kind not in "fc":
        return False
    size = abs(products)
    return bool(np.any(~np.isfinite(size) | (size < np.finfo(products.dtype).tiny)))


def _scaled_prod(
    machine: Machine, instruction: Instruction, inputs: Arrays
) -> tuple[np.ndarray, np.ndarray]:
    """Returns products as (mantissa, exponent), from numbers or from such pairs."""
    local = instruction.inputs[0].local
    over = [local.position(n) + 1 for n in parameters_of(instruction, Reduction)["over"]]
    mantissa, exponent = frexp(inputs[0])
    if len(inputs) > 1:
        exponent = exponent + inputs[1]
    rest = [at for at in range(mantissa.ndim) if at not in over]
    rows = (
        part.transpose(*over, *rest).reshape(-1, *(part.shape[at] for at in rest))
        for part in (mantissa, exponent)
    )
    return product(*rows)


def _scale(machine: Machine, instruction: Instruction, inputs: Arrays) -> np.ndarray:
    return scaled(*inputs)


EMITTERS: Mapping[str, Emitter] = {"scaled_prod": _scaled_prod, "scale": _scale}
