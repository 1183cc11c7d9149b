"""Products of named tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from meshdsl.lowering.backends.arrange import equation
from meshdsl.lowering.backends.jax.machine import Arrays, Emitter, Machine
from meshdsl.lowering.program import Instruction


def _einsum(machine: Machine, instruction: Instruction, inputs: Arrays) -> Any:
    shapes = [v.local for v in instruction.inputs]
    return jnp.einsum(equation(shapes, instruction.outputs[0].local), *inputs)


EMITTERS: Mapping[str, Emitter] = {
    "einsum": _einsum,
}
