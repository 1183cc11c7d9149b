"""Sorting along one dim of a shard.

Numbers are compared as integers, which have no NaN and only one zero. TensorFlow's top_k returns
the largest, and the first of equal ones. The smallest are the largest of the integers with all bits
inverted.
"""

from __future__ import annotations

from collections.abc import Mapping

import tensorflow as tf

from meshdsl.lowering.backends.tf import namespace as xp
from meshdsl.lowering.backends.tf.machine import Arrays, Emitter, Machine
from meshdsl.lowering.backends.tf.operations.wire_dtypes import as_keys
from meshdsl.lowering.parameters import Sort, TopK, parameters_of
from meshdsl.lowering.program import Instruction

_KEYS = ("int8", "int16", "int32", "int64")


def _largest(x: tf.Tensor, count: int, at: int, ascending: bool = False) -> list[tf.Tensor]:
    """Returns the largest or smallest of x along an axis, in order, and their indices."""
    rows = xp.moveaxis(x, at, -1)
    if rows.dtype.is_floating:
        rows = tf.where(rows == 0, tf.zeros_like(rows), rows)
    keys = as_keys(rows, "max", _KEYS)
    indices = tf.math.top_k(tf.bitwise.invert(keys) if ascending else keys, count).indices
    values = tf.gather(xp.moveaxis(x, at, -1), indices, axis=-1, batch_dims=len(x.shape) - 1)
    return [xp.moveaxis(values, -1, at), xp.moveaxis(indices, -1, at)]


def _sort(machine: Machine, instruction: Instruction, inputs: Arrays) -> list[tf.Tensor]:
    (x,), params = inputs, parameters_of(instruction, Sort)
    at = instruction.inputs[0].local.position(params["dim"])
    return _largest(x, x.shape[at], at, not params["descending"])


def _top_k(machine: Machine, instruction: Instruction, inputs: Arrays) -> list[tf.Tensor]:
    params = parameters_of(instruction, TopK)
    at = instruction.inputs[0].local.position(params["dim"])
    count = instruction.outputs[0].local.get(params["into"]).size
    return _largest(inputs[0], count, at)


EMITTERS: Mapping[str, Emitter] = {
    "sort": _sort,
    "top_k": _top_k,
}
