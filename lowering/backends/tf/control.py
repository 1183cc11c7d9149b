"""Instructions with bodies, and barriers, which keep recomputed values apart.

A scan gathers the slices of its operands by index, and writes the rows of its results in place. XLA
compiles that for TPUs, and hosts run it as it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from meshdsl.lowering.backends.tf import namespace as xp
from meshdsl.lowering.backends.tf.machine import Arrays, Emitter, Machine
from meshdsl.lowering.backends.tf.namespace import tf_dtype
from meshdsl.lowering.parameters import Scan, While, parameters_of
from meshdsl.lowering.program import Instruction, Value


def _scan(machine: Machine, instruction: Instruction, inputs: Arrays) -> list[tf.Tensor]:
    """Emits a loop over slices, which are moved to the front of their stacks."""
    params = parameters_of(instruction, Scan)
    body = params["body"]
    consts, carries, dim = params["consts"], params["carries"], params["dim"]
    length, reverse = params["length"], params["reverse"]
    fixed = list(inputs[:consts])
    stacked_values = instruction.inputs[consts + carries :]
    stacked = [
        xp.moveaxis(array, value.local.position(dim), 0)
        for array, value in zip(inputs[consts + carries :], stacked_values, strict=True)
    ]
    ahead = set(params.get("ahead", ()))
    collected = instruction.outputs[carries:]

    def slices(at: tf.Tensor) -> list[tf.Tensor]:
        """Returns the slices of an iteration; operands that are read ahead give the next ones."""
        following = (at + (-1 if reverse else 1)) % length
        return [
            tf.gather(stack, following if number in ahead else at)
            for number, stack in enumerate(stacked)
        ]

    def step(number: tf.Tensor, *state: Any) -> Sequence[Any]:
        at = length - 1 - number if reverse else number
        results = machine.run(body, [*fixed, *state[:carries], *slices(at)])
        rows = [_written(*row, at) for row in zip(state[carries:], results[carries:], strict=True)]
        return [number + 1, *results[:carries], *rows]

    rows = [_empty_rows(machine, value) for value in collected]
    start = [tf.constant(0, tf.int32), *inputs[consts : consts + carries], *rows]
    end = tf.while_loop(
        lambda number, *state: number < length,
        step,
        start,
        parallel_iterations=1,
        maximum_iterations=length,
    )
    carry = end[1 : 1 + carries]
    stacks = [_stacked(*pair) for pair in zip(end[1 + carries :], collected, strict=True)]
    return [*carry, *stacks]


def _empty_rows(machine: Machine, value: Value) -> Any:
    """Returns the buffer for the rows of a value: a tensor if XLA compiles, else a TensorArray."""
    # XLA gets a tensor from a TensorArray as well, but TensorFlow fails to convert one in a branch
    # of a `cond`. A host would copy the tensor for each row, or change it for all its users.
    length, *sizes = value.local.sizes
    if machine.links.compiled:
        return tf.zeros([length, *sizes], tf_dtype(value.dtype))
    return tf.TensorArray(tf_dtype(value.dtype), length, element_shape=sizes)


def _written(rows: Any, row: tf.Tensor, at: tf.Tensor) -> Any:
    """Returns the buffer with a row written at an index."""
    if isinstance(rows, tf.TensorArray):
        return rows.write(at, row)
    return tf.raw_ops.InplaceUpdate(x=rows, i=at[None], v=row[None])


def _stacked(rows: Any, value: Value) -> tf.Tensor:
    """Returns the buffer as a tensor."""
    if isinstance(rows, tf.TensorArray):
        rows = rows.stack()
    return tf.ensure_shape(rows, value.local.sizes)


def _while(machine: Machine, instruction: Instruction, inputs: Arrays) -> list[tf.Tensor]:
    params = parameters_of(instruction, While)
    consts = params["consts"]
    fixed = list(inputs[:consts])

    def condition(*carry: tf.Tensor) -> tf.Tensor:
        return machine.run(params["condition"], [*fixed, *carry])[0]

    def body(*carry: tf.Tensor) -> list[tf.Tensor]:
        return machine.run(params["body"], [*fixed, *carry])

    return list(tf.while_loop(condition, body, list(inputs[consts:]), parallel_iterations=1))


def _cond(machine: Machine, instruction: Instruction, inputs: Arrays) -> list[tf.Tensor]:
    if_true, if_false = instruction.bodies
    predicate, *captured = inputs
    return list(
        tf.cond(
            predicate,
            lambda: machine.run(if_true, captured),
            lambda: machine.run(if_false, captured),
        )
    )


def _barrier(machine: Machine, instruction: Instruction, inputs: Arrays) -> Arrays:
    return machine.links.barrier(inputs)


EMITTERS: Mapping[str, Emitter] = {
    "barrier": _barrier,
    "cond": _cond,
    "scan": _scan,
    "while": _while,
}
