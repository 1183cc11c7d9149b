"""Products of named tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from meshdsl.lowering.backends.arrange import equation
from meshdsl.lowering.backends.jax.machine import Arrays, Emitter, Machine
from meshdsl.lowering.program import Instruction


def _einsum(machine: Machine, instruction: Instruction, inputs: Arrays) -> Any:
    shapes, (out,) = [v.local for v in instruction.inputs], instruction.outputs
    wider = None if inputs[0].dtype == out.dtype else out.dtype
    return jnp.einsum(equation(shapes, out.local), *inputs, preferred_element_type=wider)


EMITTERS: Mapping[str, Emitter] = {
    "einsum": _einsum,
}
