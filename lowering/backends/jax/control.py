"""Instructions with bodies, and barriers between what is computed twice."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from meshdsl.lowering.backends.jax.machine import Arrays, Emitter, Machine
from meshdsl.lowering.program import Block, Instruction


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

    token, run = machine.ordered(instruction.bodies)

    def body(carry: Any, slices: Any) -> Any:
        own, passed = carry[:carries], carry[carries:]
        results = run(params["body"], [*fixed, *own, *slices, *passed])
        end = len(results) - len(passed)
        return [*results[:carries], *results[end:]], results[carries:end]

    start = [*_arrays(inputs[consts : consts + carries]), *token]
    carry, ys = lax.scan(body, start, stacked, length=params["length"], reverse=params["reverse"])
    return machine.resume([*carry[:carries], *ys, *carry[carries:]], token)


def _while(machine: Machine, instruction: Instruction, inputs: Arrays) -> Any:
    params, consts = instruction.params, instruction.params["consts"]
    fixed = list(inputs[:consts])

    token, run = machine.ordered(instruction.bodies)

    def going_on(carry: Any) -> Any:
        return run(params["condition"], [*fixed, *carry])[0]

    def following(carry: Any) -> Any:
        return run(params["body"], [*fixed, *carry])

    start = [*_arrays(inputs[consts:]), *token]
    return machine.resume(lax.while_loop(going_on, following, start), token)


def _cond(machine: Machine, instruction: Instruction, inputs: Arrays) -> Any:
    token, run = machine.ordered(instruction.bodies)

    def branch(block: Block) -> Any:
        return lambda *arrays: run(block, arrays)

    predicate, *captured = _arrays(inputs)
    if_true, if_false = map(branch, instruction.bodies)
    return machine.resume(lax.cond(predicate, if_true, if_false, *captured, *token), token)


def _arrays(values: Arrays) -> list[jax.Array]:
    return [jnp.asarray(value) for value in values]


EMITTERS: Mapping[str, Emitter] = {
    "barrier": lambda machine, instruction, inputs: lax.optimization_barrier(tuple(inputs)),
    "cond": _cond,
    "scan": _scan,
    "while": _while,
}
