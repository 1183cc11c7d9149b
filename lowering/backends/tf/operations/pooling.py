"""What sliding windows see, reduced; and compared with.

Sums and maxima are taken along one dim after the other: of long windows, from what windows of half
their size see. Comparisons take the window's positions one by one, in a loop if there are many.
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

_FEW = 8  # positions of a window along one dim that are met one by one
_UNROLLED = 32  # comparisons that are written out


@dataclass(frozen=True)
class _Window:
    """A slide along an axis, with a positive dilation."""

    at: int
    slide: Slide
    size: int
    outs: int

    @property
    def repeats(self) -> bool:
        """Whether it is as long as the elements are apart, so that it always sees one of them."""
        slide = self.slide
        return slide.base == self.size and slide.stride == slide.dilation == 1

    @property
    def count(self) -> int:
        """How many elements of what `met` returns each position of the result sees."""
        return 1 if self.repeats else self.size

    def met(self, x: tf.Tensor, fill: tf.Tensor) -> tf.Tensor:
        """Returns an operand with all that is met, and nothing more."""
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
        """How many positions the windows meet, together."""
        return (self.outs - 1) * self.slide.stride + (self.count - 1) * self.slide.dilation + 1


def _windows(instruction: Instruction) -> list[_Window]:
    params, out = parameters_of(instruction, Pool), instruction.outputs[0].local
    return [
        _Window(out.position(slide.out), slide.ahead(size), size, out.get(slide.out).size)
        for slide, size in zip(params["slides"], params["sizes"], strict=True)
    ]


def _laid(instruction: Instruction, number: int, array: tf.Tensor) -> tf.Tensor:
    """Returns an operand with its dims as the result has them."""
    have, out = instruction.inputs[number].local, instruction.outputs[0].local
    return widened(align(xp, array, have, Shape(have.get(name) for name in out.names)))


def _seen(met: tf.Tensor, windows: Sequence[_Window], places: Sequence[Any]) -> tf.Tensor:
    """Returns what all positions of the result see at one position of the windows."""
    starts, sizes = [0] * len(met.shape), met.shape.as_list()
    steps = [slice(None)] * len(sizes)
    for window, place in zip(windows, places, strict=True):
        starts[window.at] = place * window.slide.dilation
        sizes[window.at] = (window.outs - 1) * window.slide.stride + 1
        steps[window.at] = slice(None, None, window.slide.stride)
    found = tf.slice(met, tf.stack(starts), sizes)
    return found[tuple(steps)] if any(window.slide.stride > 1 for window in windows) else found


# Sums and maxima.


@dataclass(frozen=True)
class _Reduction:
    """A reduction of two tensors, and along an axis; `kind` names it in `dtypes.identity`."""

    kind: str
    of_two: Callable[[tf.Tensor, tf.Tensor], tf.Tensor]
    of_axis: Callable[[tf.Tensor, int], tf.Tensor]

    def along(self, x: tf.Tensor, window: _Window) -> tf.Tensor:
        """Returns what the windows along one axis see."""
        at, slide, count = window.at, window.slide, window.count
        if count > 1 and (window.outs == 1 or (slide.stride == count and slide.dilation == 1)):
            sizes = x.shape.as_list()
            rows = strided(x, at, slide.dilation if window.outs == 1 else 1)
            rows = tf.reshape(rows, [*sizes[:at], window.outs, count, *sizes[at + 1 :]])
            return self.of_axis(rows, at + 1)
        if count > _FEW:
            return strided(self._run(x, at, count, slide.dilation), at, slide.stride)
        found = _seen(x, [window], [0])
        for place in range(1, count):
            found = self.of_two(found, _seen(x, [window], [place]))
        return found

    def _run(self, x: tf.Tensor, at: int, count: int, step: int) -> tf.Tensor:
        """Returns what `count` positions, from each one on, hold together."""
        if count == 1:
            return x
        half = self._run(x, at, count // 2, step)
        found = self._beside(half, half, at, count // 2 * step)
        return self._beside(found, x, at, (count - 1) * step) if count % 2 else found

    def _beside(self, x: tf.Tensor, other: tf.Tensor, at: int, step: int) -> tf.Tensor:
        """Combines each position with the one of another tensor that is some steps ahead."""
        length = min(x.shape[at], other.shape[at] - step)
        return self.of_two(xp.slice_axis(x, 0, length, at), xp.slice_axis(other, step, length, at))

    def emit(self, machine: Machine, instruction: Instruction, inputs: Arrays) -> tf.Tensor:
        (out,) = instruction.outputs
        x = _laid(instruction, 0, inputs[0])
        fill = tf.cast(xp.asarray(identity(self.kind, out.dtype), out.dtype), x.dtype)
        for window in _windows(instruction):
            x = self.along(window.met(x, fill), window)
        return tf.cast(x, out.dtype)


# Comparisons.


def _match(machine: Machine, instruction: Instruction, inputs: Arrays) -> tf.Tensor:
    params, (out,) = parameters_of(instruction, WindowMatch), instruction.outputs
    here = _laid(instruction, 0, inputs[0])
    operands = [_laid(instruction, 1, inputs[1])]
    if params["extreme"] == 0:
        here = _threshold(here, params["slack"])
    else:
        operands[0] = _threshold(operands[0], params["slack"])
    fills = [tf.constant(np.nan, here.dtype)]
    if inputs[2:]:
        operands.append(_laid(instruction, 2, inputs[2]))
        fills.append(tf.zeros([], operands[1].dtype))
    windows = _windows(instruction)
    for window in windows:
        operands = [window.met(x, fill) for x, fill in zip(operands, fills, strict=True)]

    def added(total: tf.Tensor, places: Sequence[Any]) -> tf.Tensor:
        there, *amount = [_seen(x, windows, places) for x in operands]
        equal = there >= here if params["extreme"] == 0 else here >= there
        return total + (tf.where(equal, *amount, 0) if amount else tf.cast(equal, total.dtype))

    return tf.cast(_over_places(windows, added, tf.zeros_like(here)), out.dtype)


def _threshold(highest: tf.Tensor, slack: float) -> tf.Tensor:
    """Returns what nearly equals a maximum if it is as large as that."""
    lower = highest - tf.constant(slack, highest.dtype) * tf.abs(highest)
    return tf.where(tf.math.is_inf(highest), highest, lower)


def _over_places(
    windows: Sequence[_Window],
    added: Callable[[tf.Tensor, Sequence[Any]], tf.Tensor],
    total: tf.Tensor,
) -> tf.Tensor:
    """Adds something to a total for every position of the windows, given by those along each."""
    counts = [window.count for window in windows]
    if math.prod(counts) <= _UNROLLED:
        for places in itertools.product(*map(range, counts)):
            total = added(total, places)
        return total
    later = [math.prod(counts[number + 1 :]) for number in range(len(counts))]

    def following(number: tf.Tensor, total: tf.Tensor) -> list[tf.Tensor]:
        places = [number // rest % count for rest, count in zip(later, counts, strict=True)]
        return [number + 1, added(total, places)]

    _, total = tf.while_loop(
        lambda number, total: number < math.prod(counts),
        following,
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
