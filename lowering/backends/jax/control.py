"""Instructions with bodies, and barriers, which keep recomputed values apart."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from meshdsl.lowering.backends.jax.machine import Arrays, Emitter, Machine
from meshdsl.lowering.parameters import Scan, While, parameters_of
from meshdsl.lowering.program import Block, Instruction, Value


def _scan(machine: Machine, instruction: Instruction, inputs: Arrays) -> Any:
    """Emits a loop over slices, which are moved to the front of their stacks."""
    params = parameters_of(instruction, Scan)
    consts, carries, dim = params["consts"], params["carries"], params["dim"]
    fixed = list(inputs[:consts])
    stacked = [
        jnp.moveaxis(a, v.local.position(dim), 0)
        for a, v in zip(
            inputs[consts + carries :], instruction.inputs[consts + carries :], strict=True
        )
    ]

    token, run = machine.ordered(instruction.bodies)
    rounded = _rounded(params["body"])[consts + carries :]
    length, direction = params["length"], -1 if params["reverse"] else 1
    ahead = params.get("ahead", ())
    steps = jnp.arange(length, dtype=jnp.int32) if ahead else None

    def next_slices(step: Any) -> list[jax.Array]:
        """Returns the slices of the next iteration; the last one is followed by the first."""
        at = (step + direction) % length
        return [lax.dynamic_index_in_dim(stacked[n], at, keepdims=False) for n in ahead]

    def body(carry: Any, row: Any) -> Any:
        carried, effects = carry[:carries], carry[carries:]
        slices = [*row[0], *(next_slices(row[1]) if ahead else ())]
        slices = [
            lax.reduce_precision(x, 8, 7) if is_rounded else x
            for x, is_rounded in zip(slices, rounded, strict=True)
        ]
        results = run(params["body"], [*fixed, *carried, *slices, *effects])
        end = len(results) - len(effects)
        return [*results[:carries], *results[end:]], results[carries:end]

    start = [*_arrays(inputs[consts : consts + carries]), *token]
    # Operands that are read ahead come last.
    xs = [array for n, array in enumerate(stacked) if n not in ahead], steps
    carry, ys = lax.scan(body, start, xs, length=length, reverse=params["reverse"])
    return machine.resume([*carry[:carries], *ys, *carry[carries:]], token)


def _rounded(body: Block) -> list[bool]:
    """Returns for each input whether it is float32 and only cast to bfloat16."""
    # Such an input is rounded in the body. That does not change the numbers, and keeps XLA from
    # casting the full stack outside of the loop. The copy would stay in memory until the last loop
    # that reads it.
    narrow: dict[Value, bool] = dict.fromkeys(body.outputs, False)
    for instruction in reversed(body.instructions):
        for index, value in enumerate(instruction.inputs):
            if instruction.op == "barrier":
                is_cast = narrow.get(instruction.outputs[index], True)
            else:
                is_cast = instruction.op == "cast" and instruction.outputs[0].dtype == jnp.bfloat16
            narrow[value] = narrow.get(value, True) and is_cast
    return [value.dtype == jnp.float32 and narrow.get(value, False) for value in body.inputs]


def _while(machine: Machine, instruction: Instruction, inputs: Arrays) -> Any:
    params = parameters_of(instruction, While)
    consts = params["consts"]
    fixed = list(inputs[:consts])

    token, run = machine.ordered(instruction.bodies)

    def condition(carry: Any) -> Any:
        return run(params["condition"], [*fixed, *carry])[0]

    def body(carry: Any) -> Any:
        return run(params["body"], [*fixed, *carry])

    start = [*_arrays(inputs[consts:]), *token]
    return machine.resume(lax.while_loop(condition, body, start), token)


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
