"""Numbers as a mantissa and an exponent, so that products leave no range.

A mantissa is 0, infinite, NaN, or has a magnitude in [0.5, 1); that of a complex number is the
larger one of its parts'. Exponents are s32, those of 0 and of what is not finite are 0. Where a
device takes numbers below the least normal one for zeros, these are zeros here too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from meshdsl.dtypes import is_complex
from meshdsl.lowering.backends.jax.machine import Arrays, Emitter, Machine
from meshdsl.lowering.program import Instruction

Join = Callable[[Sequence[Any], Sequence[Any]], Sequence[Any]]

_BLOCK = 32  # mantissas whose product is in the range of every dtype
_LIFT = 64  # binary places that make every number normal


def parted(x: Any) -> tuple[Any, Any]:
    """Returns mantissas and exponents."""
    if not is_complex(x.dtype):
        low = jnp.abs(x) < jnp.finfo(x.dtype).tiny
        mantissa, exponent = jnp.frexp(jnp.where(low, x * 2.0**_LIFT, x))
        return mantissa, jnp.where(low & (mantissa != 0), exponent - _LIFT, exponent)
    size = jnp.maximum(jnp.abs(jnp.real(x)), jnp.abs(jnp.imag(x)))
    exponent = parted(size)[1]
    return scaled(x, -exponent), exponent


def scaled(x: Any, exponent: Any) -> Any:
    """Returns x times 2**exponent."""
    if is_complex(x.dtype):
        return lax.complex(scaled(jnp.real(x), exponent), scaled(jnp.imag(x), exponent))
    return jnp.ldexp(x, exponent)


def multiply(first: Sequence[Any], second: Sequence[Any]) -> tuple[Any, Any]:
    """Returns the product of two (mantissa, exponent)."""
    mantissa, more = parted(first[0] * second[0])
    return mantissa, first[1] + second[1] + more


def carry(first: Sequence[Any], second: Sequence[Any]) -> tuple[Any, Any, Any]:
    """Joins two stretches of a recurrence: (mantissa, exponent) of their decays, and the states."""
    mantissa, exponent = parted(first[2])
    carried = scaled(mantissa * second[0], exponent + second[1])
    return *multiply(first, second), carried + second[2]


def doubled(
    join: Join, values: Sequence[Any], fills: Sequence[float], at: int, reverse: bool
) -> Any:
    """Returns, at every place along an axis, all values up to there joined.

    Every place takes in the one before it, then the one 2 before, and so on. That is more work than
    `lax.associative_scan` does, and the join is compiled once instead of 2 log2(size) times.

    Args:
        fills: what changes nothing that it is joined with.
    """
    size = values[0].shape[at]
    place = jnp.arange(size, dtype=jnp.int32)

    def step(number: Any, values: Sequence[Any]) -> Sequence[Any]:
        by = jnp.left_shift(1, number).astype(jnp.int32)
        source = place + by if reverse else place - by
        there = ((source >= 0) & (source < size)).reshape([-1, *[1] * (values[0].ndim - at - 1)])
        taken = [jnp.take(v, source, axis=at, mode="clip") for v in values]
        before = [
            jnp.where(there, v, np.asarray(fill, v.dtype))
            for v, fill in zip(taken, fills, strict=True)
        ]
        return tuple(join(before, values))

    return lax.fori_loop(0, (size - 1).bit_length(), step, tuple(map(jnp.asarray, values)))


def products(factors: Sequence[Any], at: int, reverse: bool) -> Any:
    """Returns the products of all (mantissa, exponent) up to each, as numbers."""
    return scaled(*doubled(multiply, factors, (0.5, 1), at, reverse))


def states(factors: Sequence[Any], x: Any, at: int, reverse: bool) -> Any:
    """Returns h[i] = decay[i] * h[i-1] + x[i], given (mantissa, exponent) of the decays."""
    return doubled(carry, (*factors, x), (0.5, 1, 0), at, reverse)[2]


def _scaled_prod(machine: Machine, instruction: Instruction, inputs: Arrays) -> tuple[Any, Any]:
    local = instruction.inputs[0].local
    over = [local.position(name) for name in instruction.params["over"]]
    mantissa, exponent = parted(jnp.asarray(inputs[0]))
    if len(inputs) > 1:
        exponent = exponent + inputs[1]
    total = jnp.sum(exponent, over, dtype=jnp.int32)
    rows = jnp.moveaxis(mantissa, over, range(len(over)))
    rows = rows.reshape(-1, *rows.shape[len(over) :])
    while len(rows) > 1:
        blank = jnp.ones((-len(rows) % min(_BLOCK, len(rows)), *rows.shape[1:]), rows.dtype)
        blocks = jnp.concatenate([rows, blank])
        blocks = blocks.reshape(-1, min(_BLOCK, len(rows)), *rows.shape[1:])
        rows, more = parted(jnp.prod(blocks, 1))
        total = total + jnp.sum(more, 0, dtype=jnp.int32)
    return rows[0], total


def _scale(machine: Machine, instruction: Instruction, inputs: Arrays) -> Any:
    return scaled(*inputs)


EMITTERS: Mapping[str, Emitter] = {"scaled_prod": _scaled_prod, "scale": _scale}
