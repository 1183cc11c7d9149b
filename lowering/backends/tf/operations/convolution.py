"""Products with sliding windows, as one product of TensorFlow's.

Its kernels slide forwards, along two or three dims, over elements without zeros between them. Any
slide is brought to that: where there are zeros, neighbouring positions of the result meet elements
through different positions of the window, and so become features of one position. Dims beyond
those that a kernel slides along are spelled out: what each position of the result meets.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import tensorflow as tf

from meshdsl.lowering.backends.common.arrange import permuted
from meshdsl.lowering.backends.tf import namespace as xp
from meshdsl.lowering.backends.tf.machine import Arrays, Emitter, Machine
from meshdsl.lowering.backends.tf.operations.elementwise import widened
from meshdsl.lowering.parameters import Convolve, parameters_of
from meshdsl.lowering.program import Instruction
from meshdsl.tensors.dims import Shape
from meshdsl.tensors.slide import Slide

# A dim's name; or what a slide, by its number, makes: "x", "taps", "outs" or "phases".
Axis = str | tuple[str, int]
# Of a tensor along one of its axes; returns the sizes of the axes that it becomes as well.
_Change = Callable[[tf.Tensor, int], tuple[tf.Tensor, Mapping[Axis, int]]]


@dataclass(frozen=True, eq=False)
class _Laid:
    """A tensor with the sizes of its axes, in order; it may hold neighbours as one."""

    array: tf.Tensor
    sizes: Mapping[Axis, int]

    def merged(self, roles: Iterable[Iterable[Axis]]) -> tf.Tensor:
        """Returns the tensor with an axis for each role, of the axes that it has of that role."""
        axes = list(self.sizes)
        held = [[axis for axis in role if axis in axes] for role in roles]
        order = [axes.index(axis) for role in held for axis in role]
        laid = permuted(xp, _shaped(self.array, self.sizes.values()), order)
        return _shaped(laid, [math.prod(self.sizes[axis] for axis in role) for role in held])


def _shaped(x: tf.Tensor, sizes: Iterable[int]) -> tf.Tensor:
    return x if x.shape == (wanted := tuple(sizes)) else tf.reshape(x, wanted)


@dataclass(frozen=True, eq=False)
class _Window:
    """A slide that goes forwards over elements without zeros between them.

    Position o of the result is phase o % phases of its position o // phases, which meets element
    start + stride * (o // phases) + dilation * tap through position taps[phase, tap] of the window.

    Attributes:
        number: of the slide.
        outs: positions of the result, of each phase.
        taps: a position that is the size of the window meets nothing.
    """

    number: int
    outs: int
    start: int
    stride: int
    dilation: int
    taps: np.ndarray

    @staticmethod
    def of(number: int, slide: Slide, outs: int, size: int) -> _Window:
        """Returns that of a slide; a negative stride gives the result from its last position on."""
        stride, low, base = slide.stride, slide.low, slide.base
        if stride < 0:
            stride, low = -stride, low - stride * (outs - 1)
        phases = min(base // math.gcd(base, stride), outs)
        met = stride * np.arange(phases)[:, None] + slide.dilation * np.arange(size) - low
        elements, between = np.divmod(met, base)
        phase, position = np.nonzero(between == 0)
        elements = elements[phase, position]
        start = int(elements.min()) if elements.size else 0
        dilation = int(np.gcd.reduce(elements - start)) or 1
        at = (elements - start) // dilation
        taps = np.full((phases, int(at.max(initial=0)) + 1), size)
        taps[phase, at] = position
        step = stride * phases // base
        return _Window(number, -(-outs // phases), start, step, dilation, taps)

    @property
    def phases(self) -> int:
        return self.taps.shape[0]

    @property
    def count(self) -> int:
        """The number of taps."""
        return self.taps.shape[1]

    @property
    def slides(self) -> bool:
        return self.outs > 1 and self.count > 1

    @property
    def span(self) -> int:
        """How many elements there are from the first that is met to the last."""
        return self.stride * (self.outs - 1) + self.dilation * (self.count - 1) + 1

    @property
    def growth(self) -> float:
        """By how much an operand grows that is spelled out."""
        return self.outs * self.count / self.span

    def met(self, x: tf.Tensor, at: int) -> tf.Tensor:
        """Returns the operand with the elements that are met, and nothing more."""
        return between(x, at, self.start, self.start + self.span, tf.zeros([], x.dtype))

    def to_slide(self, x: tf.Tensor, at: int) -> tuple[tf.Tensor, Mapping[Axis, int]]:
        """Returns the operand as a kernel takes it."""
        return self.met(x, at), {("x", self.number): self.span}

    def spelled_out(self, x: tf.Tensor, at: int) -> tuple[tf.Tensor, Mapping[Axis, int]]:
        """Returns what each position of the result meets of the operand through each tap."""
        x, number = self.met(x, at), self.number
        if self.slides:
            taps = self.dilation * np.arange(self.count)
            index = self.stride * np.arange(self.outs)[:, None] + taps
            x = tf.gather(x, index.reshape(-1).astype(np.int32), axis=at)
        else:
            x = strided(x, at, self.stride if self.outs > 1 else self.dilation)
        return x, {("outs", number): self.outs, ("taps", number): self.count}

    def tapped(self, filters: tf.Tensor, at: int) -> tuple[tf.Tensor, Mapping[Axis, int]]:
        """Returns filters with the taps of each phase for their window."""
        index, size = self.taps.reshape(-1), filters.shape[at]
        if np.array_equal(index, np.arange(size)):
            pass
        elif np.array_equal(index[::-1], np.arange(size)):
            filters = tf.reverse(filters, [at])
        else:
            if size in index:
                filters = xp.pad_axis(filters, at, 0, 1, tf.zeros([], filters.dtype))
            filters = tf.gather(filters, index.astype(np.int32), axis=at)
        return filters, {("phases", self.number): self.phases, ("taps", self.number): self.count}


def between(x: tf.Tensor, at: int, start: int, stop: int, fill: tf.Tensor) -> tf.Tensor:
    """Returns the positions from one to another along an axis, with fills outside of the tensor."""
    size = x.shape[at]
    if stop > 0 and start < size:
        return xp.pad_axis(x, at, -start, stop - size, fill)
    sizes = x.shape.as_list()
    sizes[at] = stop - start
    return tf.fill(sizes, fill)


def strided(x: tf.Tensor, at: int, step: int) -> tf.Tensor:
    """Returns one of every `step` positions along an axis, from the first on."""
    return x if step == 1 else x[(slice(None),) * at + (slice(None, None, step),)]


def _computable(x: tf.Tensor) -> tf.Tensor:
    """Returns a tensor in a dtype that TensorFlow multiplies."""
    return tf.cast(x, tf.int64) if x.dtype == tf.uint64 else widened(x)


def _by_kernel(windows: Sequence[_Window], grouped: bool, dtype: tf.DType) -> list[_Window]:
    """Returns those that a kernel slides: those whose operand would grow most otherwise."""
    if not dtype.is_floating:
        return []
    wide = sorted((w for w in windows if w.slides), key=lambda window: -window.growth)[:3]
    if grouped or any(window.dilation > 1 for window in wide):
        wide = wide[:2]
    return sorted(wide, key=lambda window: window.number)


def _laid(x: tf.Tensor, shape: Shape, changes: Mapping[str, _Change]) -> _Laid:
    """Returns a tensor after changes of some of its dims, by name."""
    sizes: dict[Axis, int] = {}
    for at, dim in enumerate(shape):
        become: Mapping[Axis, int] = {dim.name: dim.size}
        if dim.name in changes:
            x, become = changes[dim.name](x, at)
        sizes |= become
    return _Laid(x, sizes)


def _product(x: _Laid, filters: _Laid, group: Sequence[str], windows: Sequence[_Window]) -> _Laid:
    """Returns the sum over what both have, but for `group`, and over the windows of a kernel."""
    slid, taps, outs = ([(name, w.number) for w in windows] for name in ("x", "taps", "outs"))
    batch = [a for a in x.sizes if a not in filters.sizes and a not in slid]
    summed = [a for a in x.sizes if a in filters.sizes and a not in group]
    made = [a for a in filters.sizes if a not in x.sizes and a not in taps]
    if windows:
        data = x.merged([batch, *([a] for a in slid), [*group, *summed]])
        kernel = filters.merged([*([a] for a in taps), summed, [*group, *made]])
        found = _slide(data, kernel, windows)
        axes = [*batch, *outs, *group, *made]
    else:
        data, kernel = x.merged([group, batch, summed]), filters.merged([group, summed, made])
        found, axes = tf.matmul(data, kernel), [*group, *batch, *made]
    sizes = {**filters.sizes, **x.sizes}
    sizes |= {("outs", window.number): window.outs for window in windows}
    return _Laid(found, {axis: sizes[axis] for axis in axes})


def _slide(data: tf.Tensor, kernel: tf.Tensor, windows: Sequence[_Window]) -> tf.Tensor:
    """Returns [batch, *outs, made] of data: [batch, *x, summed] and a kernel that slides there."""
    strides, dilations = [w.stride for w in windows], [w.dilation for w in windows]
    if len(windows) == 1:
        data, kernel = tf.expand_dims(data, 1), tf.expand_dims(kernel, 0)
        strides, dilations = [1, *strides], [1, *dilations]
    slide = tf.nn.conv3d if len(windows) == 3 else tf.nn.conv2d
    return slide(data, kernel, [1, *strides, 1], "VALID", dilations=[1, *dilations, 1])


def _placed(found: _Laid, slides: Sequence[Slide], out: Shape) -> tf.Tensor:
    """Returns a product as the result has it, with the phases of each slide side by side."""
    roles: dict[str, list[Axis]] = {name: [name] for name in out.names}
    for number, slide in enumerate(slides):
        roles[slide.out] = [("outs", number), ("phases", number)]
    array = found.merged(roles.values())
    for at, dim in enumerate(out):
        array = xp.slice_axis(array, 0, dim.size, at)
    backwards = [out.position(slide.out) for slide in slides if slide.stride < 0]
    return tf.reverse(array, backwards) if backwards else array


def _convolve(machine: Machine, instruction: Instruction, inputs: Arrays) -> tf.Tensor:
    (left, right), (out,) = (v.local for v in instruction.inputs), instruction.outputs
    slides = parameters_of(instruction, Convolve)["slides"]
    windows = [
        _Window.of(number, s, out.local.get(s.out).size, right.get(s.window).size)
        for number, s in enumerate(slides)
    ]
    plain = left.without(slide.x for slide in slides)
    others = right.without(slide.window for slide in slides).names
    result = out.local.without(slide.out for slide in slides).names
    group = [dim for dim in plain if dim.name in others and dim.name in result]
    data, kernel = map(_computable, inputs)
    kept = _by_kernel(windows, any(dim.size > 1 for dim in group), data.dtype)
    of_data = {
        s.x: w.to_slide if w in kept else w.spelled_out
        for s, w in zip(slides, windows, strict=True)
    }
    of_kernel = {s.window: w.tapped for s, w in zip(slides, windows, strict=True)}
    x, filters = _laid(data, left, of_data), _laid(kernel, right, of_kernel)
    found = _product(x, filters, [dim.name for dim in group], kept)
    return tf.cast(_placed(found, slides, out.local), out.dtype)


EMITTERS: Mapping[str, Emitter] = {
    "convolve": _convolve,
}
