"""Bit operations on aligned dims."""

from __future__ import annotations

from collections.abc import Mapping

import jax.numpy as jnp
from jax import lax

from meshdsl.lowering.backends.jax.machine import Emitter
from meshdsl.lowering.backends.jax.operations.elementwise import elementwise

EMITTERS: Mapping[str, Emitter] = {
    "bit_and": elementwise(jnp.bitwise_and),
    "bit_not": elementwise(jnp.bitwise_not),
    "bit_or": elementwise(jnp.bitwise_or),
    "bit_xor": elementwise(jnp.bitwise_xor),
    "population_count": elementwise(lax.population_count),
    "shift_left": elementwise(jnp.left_shift),
    "shift_right": elementwise(jnp.right_shift),
}
