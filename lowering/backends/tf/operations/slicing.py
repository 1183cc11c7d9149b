"""Windows of one shard."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from meshdsl.lowering.backends.tf.machine import Arrays, Emitter, Machine, constant
from meshdsl.lowering.program import Instruction


def part(x: tf.Tensor, start: Any, size: int, at: int) -> tf.Tensor:
    """Returns `size` positions along an axis, from one on that may be a tensor."""
    sizes = x.shape.as_list()
    if sizes[at] == size:
        return x
    starts = [0] * len(sizes)
    starts[at], sizes[at] = start, size
    return tf.slice(x, starts if isinstance(start, int) else tf.stack(starts), sizes)


def replaced(whole: tf.Tensor, piece: tf.Tensor, start: Any, at: int) -> tf.Tensor:
    """Returns a tensor with other values from one position on along an axis."""
    if whole.shape == piece.shape:
        return piece
    size, length = piece.shape[at], whole.shape[at]
    index = tf.range(length, dtype=tf.int32) - start
    inside = (index >= 0) & (index < size)
    column = [1] * len(whole.shape)
    column[at] = length
    found = tf.gather(piece, tf.clip_by_value(index, 0, size - 1), axis=at)
    return tf.where(tf.reshape(inside, column), found, whole)


def dilated(x: tf.Tensor, at: int, by: int, fill: tf.Tensor) -> tf.Tensor:
    """Returns a tensor with `by - 1` fills between neighbours along an axis."""
    size = x.shape[at]
    if by == 1 or size == 0:
        return x
    sizes = x.shape.as_list()
    between = tf.broadcast_to(fill, [*sizes[: at + 1], by - 1, *sizes[at + 1 :]])
    spread = tf.concat([tf.expand_dims(x, at + 1), between], at + 1)
    spread = tf.reshape(spread, [*sizes[:at], size * by, *sizes[at + 1 :]])
    return part(spread, 0, (size - 1) * by + 1, at)


def padded(x: tf.Tensor, at: int, before: int, after: int, fill: tf.Tensor) -> tf.Tensor:
    """Returns a tensor with fills around it along an axis; less of it, where they are negative."""
    size, first, last = x.shape[at], max(-before, 0), max(-after, 0)
    if first + last >= size:  # nothing of it is left
        sizes = x.shape.as_list()
        sizes[at] = size + before + after
        return tf.broadcast_to(fill, sizes)
    x = part(x, first, size - first - last, at)
    if before <= 0 and after <= 0:
        return x
    pads = [(0, 0)] * len(x.shape)
    pads[at] = (max(before, 0), max(after, 0))
    return tf.pad(x, pads, constant_values=fill)


def _window(machine: Machine, instruction: Instruction, inputs: Arrays) -> tf.Tensor:
    (x,), params, (out,) = inputs, instruction.params, instruction.outputs
    at = out.local.position(params["dim"])
    stride, dilation = params["stride"], params["dilation"]
    reach = (out.local[at].size - 1) * abs(stride)
    start = params["start"] - (reach if stride < 0 else 0)
    stop = start + reach + 1
    fill = constant(params["fill"], out.dtype)
    x = dilated(x, at, dilation, fill)
    if start < 0 or stop > x.shape[at]:
        x = padded(x, at, -start, stop - x.shape[at], fill)
        start, stop = 0, reach + 1
    if (start, stop, abs(stride)) != (0, x.shape[at], 1):
        x = x[(slice(None),) * at + (slice(start, stop, abs(stride)),)]
    return tf.reverse(x, [at]) if stride < 0 else x


EMITTERS: Mapping[str, Emitter] = {"window": _window}
