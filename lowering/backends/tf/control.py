"""Instructions with bodies, and barriers between what is computed twice.

A scan reads the slices of its stacks by their number and writes those of its results in place, so
that both kinds of devices can compile it: TPUs, and hosts.
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
    params = parameters_of(instruction, Scan)
    body = params["body"]
    consts, carries, dim = params["consts"], params["carries"], params["dim"]
    length, reverse = params["length"], params["reverse"]
    fixed = list(inputs[:consts])
    behind = instruction.inputs[consts + carries :]
    stacked = [
        xp.moveaxis(array, value.local.position(dim), 0)
        for array, value in zip(inputs[consts + carries :], behind, strict=True)
    ]
    ahead = set(params.get("ahead", ()))
    collected = instruction.outputs[carries:]

    def slices(at: tf.Tensor) -> list[tf.Tensor]:
        """Returns those of an iteration; of what is read ahead, those of the next."""
        following = (at + (-1 if reverse else 1)) % length
        return [
            tf.gather(stack, following if number in ahead else at)
            for number, stack in enumerate(stacked)
        ]

    def step(number: tf.Tensor, *state: Any) -> Sequence[Any]:
        at = length - 1 - number if reverse else number
        results = machine.run(body, [*fixed, *state[:carries], *slices(at)])
        rows = [_with(*row, at) for row in zip(state[carries:], results[carries:], strict=True)]
        return [number + 1, *results[:carries], *rows]

    rows = [_blank(machine, value) for value in collected]
    start = [tf.constant(0, tf.int32), *inputs[consts : consts + carries], *rows]
    end = tf.while_loop(
        lambda number, *state: number < length,
        step,
        start,
        parallel_iterations=1,
        maximum_iterations=length,
    )
    found = end[1 : 1 + carries]
    stacks = [_whole(*pair) for pair in zip(end[1 + carries :], collected, strict=True)]
    return [*found, *stacks]


def _blank(machine: Machine, value: Value) -> Any:
    """Returns what the rows of a value are written into: a list, or a tensor where XLA compiles.

    XLA gets a tensor for a list as well, but TensorFlow fails to make one where the list is in a
    branch of a `cond`; and a host would copy the tensor each time, or change it for all its users.
    """
    length, *sizes = value.local.sizes
    if machine.links.compiled:
        return tf.zeros([length, *sizes], tf_dtype(value.dtype))
    return tf.TensorArray(tf_dtype(value.dtype), length, element_shape=sizes)


def _with(rows: Any, row: tf.Tensor, at: tf.Tensor) -> Any:
    if isinstance(rows, tf.TensorArray):
        return rows.write(at, row)
    return tf.raw_ops.InplaceUpdate(x=rows, i=at[None], v=row[None])


def _whole(rows: Any, value: Value) -> tf.Tensor:
    if isinstance(rows, tf.TensorArray):
        rows = rows.stack()
    return tf.ensure_shape(rows, value.local.sizes)


def _while(machine: Machine, instruction: Instruction, inputs: Arrays) -> list[tf.Tensor]:
    params = parameters_of(instruction, While)
    consts = params["consts"]
    fixed = list(inputs[:consts])

    def going_on(*carry: tf.Tensor) -> tf.Tensor:
        return machine.run(params["condition"], [*fixed, *carry])[0]

    def following(*carry: tf.Tensor) -> list[tf.Tensor]:
        return machine.run(params["body"], [*fixed, *carry])

    return list(tf.while_loop(going_on, following, list(inputs[consts:]), parallel_iterations=1))


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
