"""Counter-based random bits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from meshdsl.lowering.backends.common.arrange import align
from meshdsl.lowering.backends.jax import namespace as xp
from meshdsl.lowering.backends.jax.machine import Arrays, Emitter, Machine
from meshdsl.lowering.backends.threefry import threefry2x32
from meshdsl.lowering.parameters import RandomBits, parameters_of
from meshdsl.lowering.program import Instruction

# Traced once for all draws of a shape: its 20 rounds are some 120 operations.
_words = jax.jit(threefry2x32)


def _threefry(machine: Machine, instruction: Instruction, inputs: Arrays) -> Any:
    """Returns random words of a key for each counter (high, low): pairs, or their xor."""
    key, high, low = inputs
    shape = instruction.outputs[0].local.without(["random_key"])
    high, low = (
        jnp.broadcast_to(align(xp, a, v.local, shape), shape.sizes)
        for a, v in zip((high, low), instruction.inputs[1:], strict=True)
    )
    own = instruction.inputs[0].local.without(["random_key"])
    words = [align(xp, key[..., i], own, shape) if own else key[i] for i in (0, 1)]
    first, second = _words(*words, high, low)
    pairs = parameters_of(instruction, RandomBits)["pairs"]
    return jnp.stack([first, second], -1) if pairs else first ^ second


EMITTERS: Mapping[str, Emitter] = {
    "threefry2x32": _threefry,
}
