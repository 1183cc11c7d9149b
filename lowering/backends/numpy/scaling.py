"""Numbers as a mantissa and an exponent, so that products leave no range.

A mantissa is 0, infinite, NaN, or has a magnitude in [0.5, 1); that of a complex number is the
larger one of its parts'. Exponents are s32, those of 0 and of what is not finite are 0.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from meshdsl.lowering.backends.numpy.machine import Arrays, Emitter, Machine
from meshdsl.lowering.program import Instruction

BLOCK = 32  # mantissas whose product is in the range of every dtype


def parted(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns mantissas and exponents."""
    size = np.maximum(abs(x.real), abs(x.imag)) if np.iscomplexobj(x) else abs(x)
    exponent = np.where(np.isfinite(size), np.frexp(size)[1], 0).astype(np.int32)
    return scaled(x, -exponent), exponent


def scaled(x: np.ndarray, exponent: np.ndarray) -> np.ndarray:
    """Returns x times 2**exponent."""
    if not np.iscomplexobj(x):
        return np.ldexp(x, exponent)
    found = np.empty(np.broadcast_shapes(x.shape, exponent.shape), x.dtype)
    found.real, found.imag = np.ldexp(x.real, exponent), np.ldexp(x.imag, exponent)
    return found


def _scaled_prod(
    machine: Machine, instruction: Instruction, inputs: Arrays
) -> tuple[np.ndarray, np.ndarray]:
    local = instruction.inputs[0].local
    over = [local.position(n) + 1 for n in instruction.params["over"]]
    mantissa, exponent = parted(inputs[0])
    if len(inputs) > 1:
        exponent = exponent + inputs[1]
    kept = [at for at in range(mantissa.ndim) if at not in over]
    rows, exponents = (
        each.transpose(*over, *kept).reshape(-1, *(each.shape[at] for at in kept))
        for each in (mantissa, exponent)
    )
    product, total = np.ones_like(rows[0]), exponents.sum(0, dtype=np.int32)
    for at in range(0, len(rows), BLOCK):
        product, more = parted(product * np.multiply.reduce(rows[at : at + BLOCK]))
        total = total + more
    return product, total


def _scale(machine: Machine, instruction: Instruction, inputs: Arrays) -> np.ndarray:
    return scaled(*inputs)


EMITTERS: Mapping[str, Emitter] = {"scaled_prod": _scaled_prod, "scale": _scale}
