"""Pooling: reductions over sliding windows, and the elements that equal their maximum.

Sums and maxima are computed along one dim after another. Those of long windows are computed from
those of windows of half the size. Comparisons visit the positions of the window one by one, in a
loop if there are many.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from meshdsl.lowering.backends.common.arrange import align
from meshdsl.lowering.backends.tf import namespace as xp
from meshdsl.lowering.backends.tf.machine import Arrays, Emitter, Machine
from meshdsl.lowering.backends.tf.operations.convolution import between, strided
from meshdsl.lowering.backends.tf.operations.elementwise import widened
from meshdsl.lowering.backends.tf.operations.slicing import dilated
from meshdsl.lowering.parameters import Pool, WindowMatch, parameters_of
from meshdsl.lowering.program import Instruction
from meshdsl.tensors.dims import Shape
from meshdsl.tensors.dtypes import identity
from meshdsl.tensors.slide import Slide

_FEW = 8  # positions of a window along one dim that are combined one by one
_UNROLLED = 32  # comparisons that are unrolled


@dataclass(frozen=True)
class _Window:
    """A slide along an axis, with a positive dilation."""

    at: int
    slide: Slide
    size: int
    outs: int

    @property
    def repeats(self) -> bool:
        """Whether it is as long as elements are apart, so that it has exactly one of them."""
        slide = self.slide
        return slide.base == self.size and slide.stride == slide.dilation == 1

    @property
    def count(self) -> int:
        """The number of elements of the result of `cropped` in each window."""
        return 1 if self.repeats else self.size

    def cropped(self, x: tf.Tensor, fill: tf.Tensor) -> tf.Tensor:
        """Returns an operand with exactly the positions in windows, padded with `fill`."""
        base, first = self.slide.base, -self.slide.low
        if self.repeats:
            sizes = x.shape.as_list()
            wide = [*sizes[: self.at + 1], base, *sizes[self.at + 1 :]]
            x = tf.broadcast_to(tf.expand_dims(x, self.at + 1), wide)
            sizes[self.at] *= base
            x, first = tf.reshape(x, sizes), first + base - 1
        else:
            x = dilated(x, self.at, base, fill)
        return between(x, self.at, first, first + self.reach, fill)

    @property
    def reach(self) -> int:
        """The number of positions from the first in a window to the last."""
        return (self.outs - 1) * self.slide.stride + (self.count - 1) * self.slide.dilation + 1


def _windows(instruction: Instruction) -> list[_Window]:
    params, out = parameters_of(instruction, Pool), instruction.outputs[0].local
    return [
        _Window(out.position(slide.out), slide.ahead(size), size, out.get(slide.out).size)
        for slide, size in zip(params["slides"], params["sizes"], strict=True)
    ]


def _aligned(instruction: Instruction, number: int, array: tf.Tensor) -> tf.Tensor:
    """Returns an operand with the dims of the result, in a dtype that TensorFlow computes in."""
    have, out = instruction.inputs[number].local, instruction.outputs[0].local
    return widened(align(xp, array, have, Shape(have.get(name) for name in out.names)))


def _at_position(x: tf.Tensor, windows: Sequence[_Window], positions: Sequence[Any]) -> tf.Tensor:
    """Returns the elements at one position of all windows: [dims of the result]."""
    starts, sizes = [0] * len(x.shape), x.shape.as_list()
    steps = [slice(None)] * len(sizes)
    for window, position in zip(windows, positions, strict=True):
        starts[window.at] = position * window.slide.dilation
        sizes[window.at] = (window.outs - 1) * window.slide.stride + 1
        steps[window.at] = slice(None, None, window.slide.stride)
    elements = tf.slice(x, tf.stack(starts), sizes)
    return (
        elements[tuple(steps)] if any(window.slide.stride > 1 for window in windows) else elements
    )


# Sums and maxima.


@dataclass(frozen=True)
class _Reduction:
    """A reduction of two tensors, and along an axis; `kind` names it in `dtypes.identity`."""

    kind: str
    of_two: Callable[[tf.Tensor, tf.Tensor], tf.Tensor]
    of_axis: Callable[[tf.Tensor, int], tf.Tensor]

    def along(self, x: tf.Tensor, window: _Window) -> tf.Tensor:
        """Returns the reduction of windows along one axis."""
        at, slide, count = window.at, window.slide, window.count
        if count > 1 and (window.outs == 1 or (slide.stride == count and slide.dilation == 1)):
            sizes = x.shape.as_list()
            rows = strided(x, at, slide.dilation if window.outs == 1 else 1)
            rows = tf.reshape(rows, [*sizes[:at], window.outs, count, *sizes[at + 1 :]])
            return self.of_axis(rows, at + 1)
        if count > _FEW:
            return strided(self._windowed(x, at, count, slide.dilation), at, slide.stride)
        result = _at_position(x, [window], [0])
        for position in range(1, count):
            result = self.of_two(result, _at_position(x, [window], [position]))
        return result

    def _windowed(self, x: tf.Tensor, at: int, count: int, step: int) -> tf.Tensor:
        """Returns the reduction of `count` positions, `step` apart, from each position on."""
        if count == 1:
            return x
        half = self._windowed(x, at, count // 2, step)
        result = self._combined(half, half, at, count // 2 * step)
        return self._combined(result, x, at, (count - 1) * step) if count % 2 else result

    def _combined(self, x: tf.Tensor, later: tf.Tensor, at: int, step: int) -> tf.Tensor:
        """Combines each position with that of another tensor `step` positions later."""
        length = min(x.shape[at], later.shape[at] - step)
        return self.of_two(xp.slice_axis(x, 0, length, at), xp.slice_axis(later, step, length, at))

    def emit(self, machine: Machine, instruction: Instruction, inputs: Arrays) -> tf.Tensor:
        (out,) = instruction.outputs
        x = _aligned(instruction, 0, inputs[0])
        fill = tf.cast(xp.asarray(identity(self.kind, out.dtype), out.dtype), x.dtype)
        for window in _windows(instruction):
            x = self.along(window.cropped(x, fill), window)
        return tf.cast(x, out.dtype)


# Comparisons.


def _match(machine: Machine, instruction: Instruction, inputs: Arrays) -> tf.Tensor:
    """Sums over each window the amounts, or ones, where an element equals the maximum.

    The parameter `extreme` says which operand has the maxima: 0: the first, else the second.
    """
    params, (out,) = parameters_of(instruction, WindowMatch), instruction.outputs
    left = _aligned(instruction, 0, inputs[0])
    operands = [_aligned(instruction, 1, inputs[1])]
    if params["extreme"] == 0:
        left = _threshold(left, params["slack"])
    else:
        operands[0] = _threshold(operands[0], params["slack"])
    fills = [tf.constant(np.nan, left.dtype)]
    if inputs[2:]:
        operands.append(_aligned(instruction, 2, inputs[2]))
        fills.append(tf.zeros([], operands[1].dtype))
    windows = _windows(instruction)
    for window in windows:
        operands = [window.cropped(x, fill) for x, fill in zip(operands, fills, strict=True)]

    def added(total: tf.Tensor, positions: Sequence[Any]) -> tf.Tensor:
        right, *amount = [_at_position(x, windows, positions) for x in operands]
        equal = right >= left if params["extreme"] == 0 else left >= right
        return total + (tf.where(equal, *amount, 0) if amount else tf.cast(equal, total.dtype))

    return tf.cast(_over_positions(windows, added, tf.zeros_like(left)), out.dtype)


def _threshold(highest: tf.Tensor, slack: float) -> tf.Tensor:
    """Returns the least number that counts as equal to a maximum."""
    lower = highest - tf.constant(slack, highest.dtype) * tf.abs(highest)
    return tf.where(tf.math.is_inf(highest), highest, lower)


def _over_positions(
    windows: Sequence[_Window],
    added: Callable[[tf.Tensor, Sequence[Any]], tf.Tensor],
    total: tf.Tensor,
) -> tf.Tensor:
    """Adds to a total for every position of the windows; a position has an index for each dim."""
    counts = [window.count for window in windows]
    if math.prod(counts) <= _UNROLLED:
        for positions in itertools.product(*map(range, counts)):
            total = added(total, positions)
        return total
    strides = [math.prod(counts[number + 1 :]) for number in range(len(counts))]

    def step(number: tf.Tensor, total: tf.Tensor) -> list[tf.Tensor]:
        positions = [
            number // stride % count for stride, count in zip(strides, counts, strict=True)
        ]
        return [number + 1, added(total, positions)]

    _, total = tf.while_loop(
        lambda number, total: number < math.prod(counts),
        step,
        [tf.constant(0, tf.int32), total],
        parallel_iterations=1,
    )
    return total


_SUM = _Reduction("sum", tf.add, tf.reduce_sum)
_MAX = _Reduction("max", tf.maximum, tf.reduce_max)

EMITTERS: Mapping[str, Emitter] = {
    "window_sum": _SUM.emit,
    "window_max": _MAX.emit,
    "window_match": _match,
}
