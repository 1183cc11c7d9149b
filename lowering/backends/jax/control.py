"""Instructions with bodies, and barriers between what is computed twice."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jax import lax

from meshdsl.lowering.backends.jax.machine import Arrays, Emitter, Machine
from meshdsl.lowering.program import Instruction


def _scan(machine: Machine, instruction: Instruction, inputs: Arrays) -> Any:
    params = instruction.params
    consts, carries, dim = params["consts"], params["carries"], params["dim"]
    fixed = list(inputs[:consts])
    stacked = [
        jnp.moveaxis(a, v.local.position(dim), 0)
        for a, v in zip(
            inputs[consts + carries :], instruction.inputs[consts + carries :], strict=True
        )
    ]

    def body(carry: Any, slices: Any) -> Any:
        results = machine.run(params["body"], [*fixed, *carry, *slices])
        results = [jnp.asarray(r) for r in results]
        return results[:carries], results[carries:]

    start = [jnp.asarray(a) for a in inputs[consts : consts + carries]]
    carry, ys = lax.scan(body, start, stacked, length=params["length"], reverse=params["reverse"])
    return [*carry, *ys]


EMITTERS: Mapping[str, Emitter] = {
    "barrier": lambda machine, instruction, inputs: lax.optimization_barrier(tuple(inputs)),
    "scan": _scan,
}
