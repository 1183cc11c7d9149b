"""Elementwise instructions: jax.numpy on aligned dims."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
from jax import lax

from meshdsl.lowering.backends.arrange import NUMPY_NAMES
from meshdsl.lowering.backends.jax.machine import Arrays, Emitter, Machine, align
from meshdsl.lowering.program import Instruction


def _elementwise(compute: Callable[..., Any]) -> Emitter:
    def emit(machine: Machine, instruction: Instruction, inputs: Arrays) -> Any:
        (out,) = instruction.outputs
        aligned = [
            a if not v.shape else align(a, v.local, out.local)
            for a, v in zip(inputs, instruction.inputs, strict=True)
        ]
        result = compute(*aligned)
        return jnp.broadcast_to(result, out.local.sizes)

    return emit


EMITTERS: Mapping[str, Emitter] = {
    **{name: _elementwise(getattr(jnp, name)) for name in NUMPY_NAMES},
    "round": _elementwise(jnp.round),
    "rsqrt": _elementwise(lax.rsqrt),
    "sigmoid": _elementwise(lax.logistic),
    "erf": _elementwise(lax.erf),
    "shift_right": lambda machine, instruction, inputs: lax.shift_right_logical(
        inputs[0], inputs[0].dtype.type(instruction.params["places"])
    ),
    "select": _elementwise(jnp.where),
    "cast": lambda machine, instruction, inputs: jnp.asarray(inputs[0]).astype(
        instruction.outputs[0].dtype
    ),
}
