"""Reductions over named dims of one shard."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf

from meshdsl.lowering.backends.tf.machine import Arrays, Emitter, Machine
from meshdsl.lowering.backends.tf.operations.elementwise import widened
from meshdsl.lowering.backends.tf.operations.scaling import frexp, in_rows, product, scaled
from meshdsl.lowering.parameters import AlongDim, Reduction, parameters_of
from meshdsl.lowering.program import Instruction
from meshdsl.tensors.dtypes import is_differentiable, is_float


def _reduction(compute: Callable[..., Any]) -> Emitter:
    """Returns the emitter of a reduction over some dims."""

    def emit(machine: Machine, instruction: Instruction, inputs: Arrays) -> tf.Tensor:
        local, dtype = instruction.inputs[0].local, instruction.inputs[0].dtype
        at = [local.position(n) for n in parameters_of(instruction, Reduction)["over"]]
        if dtype.kind == "b":
            compute_bools = {tf.reduce_max: tf.reduce_any, tf.reduce_min: tf.reduce_all}
            return compute_bools[compute](inputs[0], axis=at)
        return tf.cast(compute(widened(inputs[0]), axis=at), instruction.outputs[0].dtype)

    return emit


def _prod(machine: Machine, instruction: Instruction, inputs: Arrays) -> tf.Tensor:
    """Returns products, from mantissas and exponents: a partial product may leave the range."""
    x, local = inputs[0], instruction.inputs[0].local
    at = [local.position(n) for n in parameters_of(instruction, Reduction)["over"]]
    if not is_differentiable(instruction.inputs[0].dtype):
        return tf.cast(tf.reduce_prod(widened(x), axis=at), x.dtype)
    mantissa, exponent = frexp(x)
    return scaled(*product(in_rows(mantissa, at), in_rows(exponent, at)))


def _arg(compute: Callable[..., Any]) -> Emitter:
    """Returns the emitter of argmax or argmin; the first NaN wins, as in numpy."""

    def emit(machine: Machine, instruction: Instruction, inputs: Arrays) -> tf.Tensor:
        at = instruction.inputs[0].local.position(parameters_of(instruction, AlongDim)["dim"])
        x = widened(inputs[0])
        if x.dtype == tf.bool:
            x = tf.cast(x, tf.int32)
        index = compute(x, axis=at, output_type=tf.int32)
        if not is_float(instruction.inputs[0].dtype):
            return index
        is_nan = tf.math.is_nan(x)
        first = tf.argmax(tf.cast(is_nan, tf.int32), axis=at, output_type=tf.int32)
        return tf.where(tf.reduce_any(is_nan, at), first, index)

    return emit


EMITTERS: Mapping[str, Emitter] = {
    "sum": _reduction(tf.reduce_sum),
    "prod": _prod,
    "argmax": _arg(tf.argmax),
    "argmin": _arg(tf.argmin),
    "max": _reduction(tf.reduce_max),
    "min": _reduction(tf.reduce_min),
}
