"""Instructions with bodies, and barriers, which keep recomputed values apart."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from meshdsl.lowering.backends.jax.machine import Arrays, Emitter, Machine
from meshdsl.lowering.backends.jax.stacks import Stacks, written_stacks
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

    written = written_stacks(instruction) if machine.in_place else []
    stacks = Stacks(machine.emitters["update"])
    if written:
        machine = replace(machine, emitters={**machine.emitters, "update": stacks.update})
    token, run = machine.ordered(instruction.bodies)
    rounded = _rounded(params["body"])[consts + carries :]
    length, direction = params["length"], -1 if params["reverse"] else 1
    ahead = params.get("ahead", ())
    steps = jnp.arange(length, dtype=jnp.int32) if ahead or written else None
    passed = [n for n in range(len(stacked)) if n not in {*ahead, *(w.operand for w in written)}]

    def next_slices(step: Any) -> list[jax.Array]:
        """Returns the slices of the next iteration; the last one is followed by the first."""
        at = (step + direction) % length
        return [lax.dynamic_index_in_dim(stacked[n], at, keepdims=False) for n in ahead]

    def body(carry: Any, row: Any) -> Any:
        carried, effects = carry[:carries], carry[carries + len(written) :]
        stacks.begin(row[1], written, carry[carries : carries + len(written)])
        by_number = dict(zip(passed, row[0], strict=True))
        by_number |= {one.operand: stacks.slice(one.update) for one in written}
        by_number |= dict(zip(ahead, next_slices(row[1]) if ahead else (), strict=True))
        slices = [
            lax.reduce_precision(by_number[n], 8, 7) if is_rounded else by_number[n]
            for n, is_rounded in enumerate(rounded)
        ]
        results = run(params["body"], [*fixed, *carried, *slices, *effects])
        end = len(results) - len(effects)
        updated = [stacks.arrays[one.update] for one in written]
        ys = [y for n, y in enumerate(results[carries:end]) if n not in in_place]
        return [*results[:carries], *updated, *results[end:]], ys

    in_place = [one.result for one in written]
    start = [*_arrays(inputs[consts : consts + carries]), *(stacked[w.operand] for w in written)]
    xs = [stacked[n] for n in passed], steps
    loop = _unfilled_scan if machine.unfilled else lax.scan
    carry, ys = loop(body, [*start, *token], xs, length=length, reverse=params["reverse"])
    updated = dict(zip(in_place, carry[carries:], strict=False))
    others = iter(ys)
    results = [updated[n] if n in updated else next(others) for n in range(len(updated) + len(ys))]
    return machine.resume([*carry[:carries], *results, *carry[len(start) :]], token)


def _unfilled_scan(
    body: Callable, start: Sequence[jax.Array], xs: Any, *, length: int, reverse: bool
) -> tuple[Any, list[jax.Array]]:
    """Runs a scan whose stacks of results begin uninitialised: its iterations write all of them."""
    # `lax.scan` fills them with zeros before the loop, and the compiler of TPUs keeps that. For a
    # stack of gradients it takes as long as one more pass over all of them.
    slices = jax.tree.map(lambda stack: jax.typeof(stack[0]), xs)
    _, rows = jax.eval_shape(body, list(start), slices)
    empty = [lax.empty((length, *row.shape), row.dtype) for row in rows]

    def step(state: Any, row: Any) -> Any:
        carry, stacks = state
        position, slices = row
        carry, results = body(carry, slices)
        pairs = zip(stacks, results, strict=True)
        return (carry, [lax.dynamic_update_index_in_dim(s, r, position, 0) for s, r in pairs]), None

    positions = jnp.arange(length, dtype=jnp.int32)
    state, _ = lax.scan(step, (list(start), empty), (positions, xs), length=length, reverse=reverse)
    return state


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
