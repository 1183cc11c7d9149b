"""Slices of one shard, with strides and dilation."""

from __future__ import annotations

from collections.abc import Mapping

import tensorflow as tf

from meshdsl.lowering.backends.tf import namespace as xp
from meshdsl.lowering.backends.tf.machine import Arrays, Emitter, Machine
from meshdsl.lowering.parameters import Window, parameters_of
from meshdsl.lowering.program import Instruction


def dilated(x: tf.Tensor, at: int, by: int, fill: tf.Tensor) -> tf.Tensor:
    """Returns a tensor with `by - 1` times `fill` between neighbours along an axis."""
    size = x.shape[at]
    if by == 1 or size == 0:
        return x
    sizes = x.shape.as_list()
    between = tf.broadcast_to(fill, [*sizes[: at + 1], by - 1, *sizes[at + 1 :]])
    spread = tf.concat([tf.expand_dims(x, at + 1), between], at + 1)
    spread = tf.reshape(spread, [*sizes[:at], size * by, *sizes[at + 1 :]])
    return xp.slice_axis(spread, 0, (size - 1) * by + 1, at)


def _window(machine: Machine, instruction: Instruction, inputs: Arrays) -> tf.Tensor:
    """Returns positions start + i * stride of the operand after dilation; `fill` elsewhere."""
    (x,), params, (out,) = inputs, parameters_of(instruction, Window), instruction.outputs
    at = out.local.position(params["dim"])
    stride, dilation = params["stride"], params["dilation"]
    reach = (out.local[at].size - 1) * abs(stride)
    start = params["start"] - (reach if stride < 0 else 0)
    stop = start + reach + 1
    fill = xp.asarray(params["fill"], out.dtype)
    x = dilated(x, at, dilation, fill)
    if start < 0 or stop > x.shape[at]:
        x = xp.pad_axis(x, at, -start, stop - x.shape[at], fill)
        start, stop = 0, reach + 1
    if (start, stop, abs(stride)) != (0, x.shape[at], 1):
        x = x[(slice(None),) * at + (slice(start, stop, abs(stride)),)]
    return tf.reverse(x, [at]) if stride < 0 else x


EMITTERS: Mapping[str, Emitter] = {"window": _window}
