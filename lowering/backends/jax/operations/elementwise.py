"""Elementwise instructions: JAX's functions; the table has those of other names or semantics."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.scipy import special

from meshdsl.lowering.backends.common.elementwise import elementwise, functions
from meshdsl.lowering.backends.common.special import log_gamma
from meshdsl.lowering.backends.jax.machine import Arrays, Emitter, Machine
from meshdsl.lowering.program import Instruction


def _by_zero_is_zero(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a division in which integers divided by 0 give 0."""

    def divide(x: Any, y: Any) -> Any:
        if not jnp.issubdtype(y.dtype, jnp.integer):
            return function(x, y)
        return jnp.where(y == 0, 0, function(x, jnp.where(y == 0, 1, y)))

    return divide


def _power(x: Any, y: Any) -> Any:
    """Returns powers; integers to a negative power are 0."""
    if not jnp.issubdtype(y.dtype, jnp.integer):
        return jnp.power(x, y)
    if isinstance(y, np.ndarray) and y.ndim == 0:
        return lax.integer_pow(x, int(y)) if y >= 0 else jnp.zeros_like(x)

    # Exponentiation by squaring: one step for each bit of the exponent.
    def step(_: Any, state: Any) -> Any:
        result, base, rest = state
        odd = (rest & 1) == 1
        return (
            jnp.where(odd, result * base, result),
            base * base,
            lax.shift_right_logical(rest, ones),
        )

    x, y = jnp.broadcast_arrays(x, y)
    ones = jnp.ones_like(y)
    result, *_ = lax.fori_loop(0, 8 * y.dtype.itemsize, step, (jnp.ones_like(x), x, y))
    return jnp.where(y < 0, 0, result)


def _exp2(x: Any) -> Any:
    # In half precision, JAX would round x * log(2) before the exponential.
    return jnp.exp2(x.astype(jnp.float32)).astype(x.dtype) if x.itemsize < 4 else jnp.exp2(x)


def _lgamma(x: Any) -> Any:
    wide = x.astype(jnp.float32) if x.itemsize < 4 else x
    found = log_gamma(wide, wide.itemsize, lax.lgamma, jnp.log, jnp.where)
    return found.astype(x.dtype)


def _power_of_two(x: Any) -> Any:
    wide = x.astype(jnp.float32) if x.itemsize < 4 else x
    unsigned = jnp.dtype(f"uint{8 * wide.dtype.itemsize}")
    limits = jnp.finfo(wide.dtype)
    exponent = unsigned.type(limits.maxexp * 2 - 1 << limits.nmant)
    bits = lax.bitcast_convert_type(wide, unsigned) & exponent
    return lax.bitcast_convert_type(bits, wide.dtype).astype(x.dtype)


def _cast(machine: Machine, instruction: Instruction, inputs: Arrays) -> Any:
    return jnp.asarray(inputs[0]).astype(instruction.outputs[0].dtype)


_OWN: Mapping[str, Callable[..., Any]] = {
    "bit_and": jnp.bitwise_and,
    "bit_not": jnp.bitwise_not,
    "bit_or": jnp.bitwise_or,
    "bit_xor": jnp.bitwise_xor,
    "complex": lambda x, y: lax.complex(*jnp.broadcast_arrays(x, y)),
    "exp2": _exp2,
    "floor_divide": _by_zero_is_zero(jnp.floor_divide),
    "lgamma": _lgamma,
    "polygamma": lambda n, x: lax.polygamma(*jnp.broadcast_arrays(n, x)),
    "power": _power,
    "power_of_two": _power_of_two,
    "remainder": _by_zero_is_zero(jnp.remainder),
    "select": jnp.where,
    "shift_left": jnp.left_shift,
    "shift_right": jnp.right_shift,
    "sigmoid": lax.logistic,
    "zeta": special.zeta,  # lax.zeta does not broadcast
}

EMITTERS: Mapping[str, Emitter] = {
    name: elementwise(function) for name, function in functions(_OWN, [jnp, lax, special]).items()
} | {"cast": _cast}
