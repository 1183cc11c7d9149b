"""Elementwise instructions: jax.numpy on aligned dims."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from meshdsl.lowering.backends.arrange import NUMPY_NAMES
from meshdsl.lowering.backends.jax.machine import Arrays, Emitter, Machine, align
from meshdsl.lowering.program import Instruction


def elementwise(compute: Callable[..., Any]) -> Emitter:
    """Returns the emitter of a function of arrays that broadcast by position."""

    def emit(machine: Machine, instruction: Instruction, inputs: Arrays) -> Any:
        (out,) = instruction.outputs
        aligned = [
            a if not v.shape else align(a, v.local, out.local)
            for a, v in zip(inputs, instruction.inputs, strict=True)
        ]
        result = compute(*aligned)
        return jnp.broadcast_to(result, out.local.sizes)

    return emit


def _by(function: Callable[..., Any]) -> Callable[..., Any]:
    """Of whole numbers, a division by 0 gives 0."""

    def divide(x: Any, y: Any) -> Any:
        if not jnp.issubdtype(y.dtype, jnp.integer):
            return function(x, y)
        return jnp.where(y == 0, 0, function(x, jnp.where(y == 0, 1, y)))

    return divide


def _power(x: Any, y: Any) -> Any:
    if not jnp.issubdtype(y.dtype, jnp.integer):
        return jnp.power(x, y)
    if isinstance(y, np.ndarray) and y.ndim == 0:
        return lax.integer_pow(x, int(y)) if y >= 0 else jnp.zeros_like(x)

    def step(_: Any, state: Any) -> Any:
        result, base, left = state
        odd = (left & 1) == 1
        return (
            jnp.where(odd, result * base, result),
            base * base,
            lax.shift_right_logical(left, one),
        )

    x, y = jnp.broadcast_arrays(x, y)
    one = jnp.ones_like(y)
    result, *_ = lax.fori_loop(0, 8 * y.dtype.itemsize, step, (jnp.ones_like(x), x, y))
    return jnp.where(y < 0, 0, result)


def _exp2(x: Any) -> Any:
    """In half precision JAX would round x * log(2) before it takes the exponential."""
    return jnp.exp2(x.astype(jnp.float32)).astype(x.dtype) if x.itemsize < 4 else jnp.exp2(x)


EMITTERS: Mapping[str, Emitter] = {
    **{name: elementwise(getattr(jnp, name)) for name in NUMPY_NAMES},
    "round": elementwise(jnp.round),
    "rsqrt": elementwise(lax.rsqrt),
    "sigmoid": elementwise(lax.logistic),
    "remainder": elementwise(_by(jnp.remainder)),
    "floor_divide": elementwise(_by(jnp.floor_divide)),
    "power": elementwise(_power),
    "exp2": elementwise(_exp2),
    "select": elementwise(jnp.where),
    "cast": lambda machine, instruction, inputs: jnp.asarray(inputs[0]).astype(
        instruction.outputs[0].dtype
    ),
    "real": elementwise(jnp.real),
    "imag": elementwise(jnp.imag),
    "conj": elementwise(jnp.conj),
    "complex": elementwise(lambda x, y: lax.complex(*jnp.broadcast_arrays(x, y))),
}
