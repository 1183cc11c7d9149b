"""Numbers as a mantissa and an exponent, so that products do not overflow or underflow.

A mantissa is 0, infinite, NaN, or has a magnitude in [0.5, 1). A complex number has one exponent,
that of the larger of its parts. Exponents are s32; those of 0, inf and NaN are arbitrary. If a
device flushes subnormal numbers to zero, they are zero here, too.

Dtypes are float32, float64, complex64 and complex128: half precision is multiplied in float32. The
sum of a dim's exponents must fit in s32: 14 million factors at the limits of float32, 2 million at
those of float64.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from meshdsl.lowering.backends.jax.machine import Arrays, Emitter, Machine
from meshdsl.lowering.parameters import Reduction, parameters_of
from meshdsl.lowering.program import Instruction
from meshdsl.tensors.dtypes import is_complex, real_dtype

_BLOCK = 32  # mantissas whose product, 2**-32 at least, is normal in float32 and wider
_LIFT = 64  # binary places that make every number of float32 and wider normal


def frexp(x: Any) -> tuple[Any, Any]:
    """Returns the mantissas and exponents of numbers, also of complex ones."""
    assert real_dtype(np.dtype(x.dtype)).itemsize >= 4, "half precision is multiplied in float32"
    if not is_complex(x.dtype):
        low = jnp.abs(x) < jnp.finfo(x.dtype).tiny
        mantissa, exponent = jnp.frexp(jnp.where(low, x * 2.0**_LIFT, x))
        return mantissa, jnp.where(low & (mantissa != 0), exponent - _LIFT, exponent)
    size = jnp.maximum(jnp.abs(jnp.real(x)), jnp.abs(jnp.imag(x)))
    exponent = frexp(size)[1]
    return scaled(x, -exponent), exponent


def scaled(x: Any, exponent: Any) -> Any:
    """Returns x times 2**exponent."""
    if is_complex(x.dtype):
        return lax.complex(scaled(jnp.real(x), exponent), scaled(jnp.imag(x), exponent))
    return jnp.ldexp(x, exponent)


def multiply(first: Sequence[Any], second: Sequence[Any]) -> tuple[Any, Any]:
    """Returns the product of two numbers, each a (mantissa, exponent)."""
    mantissa, more = frexp(first[0] * second[0])
    return mantissa, first[1] + second[1] + more


def products(factors: Sequence[Any], at: int, reverse: bool) -> tuple[Any, Any]:
    """Returns the (mantissa, exponent) of the product up to each position along an axis."""
    # Each position is multiplied by the one before it, then by the one 2 before, 4 before, and so
    # on. That is more work than `lax.associative_scan` does, but `multiply` is compiled once
    # instead of 2 log2(size) times.
    like = factors[0]
    size = like.shape[at]
    positions = jnp.arange(size, dtype=jnp.int32)

    def step(number: Any, values: Sequence[Any]) -> tuple[Any, Any]:
        distance = jnp.left_shift(1, number).astype(jnp.int32)
        source = positions + distance if reverse else positions - distance
        inside = ((source >= 0) & (source < size)).reshape([-1, *[1] * (like.ndim - at - 1)])
        mantissa, exponent = (jnp.take(v, source, axis=at, mode="clip") for v in values)
        ones = np.ones((), mantissa.dtype)  # neither part of 0.5 * 2**1 changes a factor
        before = jnp.where(inside, mantissa, ones / 2), jnp.where(inside, exponent, 1)
        return multiply(before, values)

    start = (jnp.asarray(like), jnp.asarray(factors[1], jnp.int32))
    return lax.fori_loop(0, (size - 1).bit_length(), step, start)


def product(mantissa: Any, exponent: Any, over: Sequence[int]) -> tuple[Any, Any]:
    """Returns the (mantissa, exponent) of the product along some axes."""
    total = jnp.sum(exponent, over, dtype=jnp.int32)
    rows = jnp.moveaxis(mantissa, over, range(len(over)))
    rows = rows.reshape(-1, *rows.shape[len(over) :])
    while len(rows) > 1:
        blank = jnp.ones((-len(rows) % min(_BLOCK, len(rows)), *rows.shape[1:]), rows.dtype)
        blocks = jnp.concatenate([rows, blank])
        blocks = blocks.reshape(-1, min(_BLOCK, len(rows)), *rows.shape[1:])
        rows, more = frexp(jnp.prod(blocks, 1))
        total = total + jnp.sum(more, 0, dtype=jnp.int32)
    return rows[0], total


def out_of_range(products: Any) -> Any:
    """Whether any product may have left the range: it is not finite, or not a normal number."""
    size = jnp.abs(products)
    return jnp.any(~jnp.isfinite(size) | (size < jnp.finfo(products.dtype).tiny))


def _scaled_prod(machine: Machine, instruction: Instruction, inputs: Arrays) -> tuple[Any, Any]:
    """Returns products as (mantissa, exponent), from numbers or from such pairs."""
    local = instruction.inputs[0].local
    over = [local.position(name) for name in parameters_of(instruction, Reduction)["over"]]
    mantissa, exponent = frexp(jnp.asarray(inputs[0]))
    if len(inputs) > 1:
        exponent = exponent + inputs[1]
    return product(mantissa, exponent, over)


def _scale(machine: Machine, instruction: Instruction, inputs: Arrays) -> Any:
    return scaled(*inputs)


EMITTERS: Mapping[str, Emitter] = {"scaled_prod": _scaled_prod, "scale": _scale}
