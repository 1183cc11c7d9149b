"""Convolutions, as one product or convolution of TensorFlow's.

TensorFlow's kernels slide forwards, along two or three dims, without dilation of the input (zeros
between elements). Any slide is converted to that form. With zeros between elements, neighbouring
positions of the result meet elements through different positions of the window. Such positions are
the phases of one position, and become its features. If there are more dims than a kernel slides
along, the windows of the others are gathered (im2col).
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

# A dim's name; or an axis of a slide, with its number: "x", "taps", "outs" or "phases".
Axis = str | tuple[str, int]
# (tensor, axis) -> the tensor with other axes instead, and the sizes of these
_Change = Callable[[tf.Tensor, int], tuple[tf.Tensor, Mapping[Axis, int]]]


@dataclass(frozen=True, eq=False)
class _Axes:
    """A tensor with the names and sizes of its axes; neighbouring axes may be merged in it."""

    array: tf.Tensor
    sizes: Mapping[Axis, int]

    def merged(self, roles: Iterable[Iterable[Axis]]) -> tf.Tensor:
        """Returns the tensor with one axis for each role, merged from its axes of that role."""
        axes = list(self.sizes)
        own_roles = [[axis for axis in role if axis in axes] for role in roles]
        order = [axes.index(axis) for role in own_roles for axis in role]
        ordered = permuted(xp, _shaped(self.array, self.sizes.values()), order)
        return _shaped(
            ordered, [math.prod(self.sizes[axis] for axis in role) for role in own_roles]
        )


def _shaped(x: tf.Tensor, sizes: Iterable[int]) -> tf.Tensor:
    """Returns a tensor in another shape; itself if the shape is the same."""
    return x if x.shape == (wanted := tuple(sizes)) else tf.reshape(x, wanted)


@dataclass(frozen=True, eq=False)
class _Window:
    """A slide in the form of TensorFlow's kernels: forwards, without zeros between elements.

    Position o of the result is phase o % phases of position o // phases. That position meets
    element start + stride * (o // phases) + dilation * tap at position taps[phase, tap] of the
    window.

    Attributes:
        number: of the slide.
        outs: the number of positions of the result in each phase.
        taps: [phases, taps]; the size of the window stands for a tap that meets no element.
    """

    number: int
    outs: int
    start: int
    stride: int
    dilation: int
    taps: np.ndarray

    @staticmethod
    def of(number: int, slide: Slide, outs: int, size: int) -> _Window:
        """Returns the window of a slide; with a negative stride, the result is in reverse order."""
        stride, low, base = slide.stride, slide.low, slide.base
        if stride < 0:
            stride, low = -stride, low - stride * (outs - 1)
        phases = min(base // math.gcd(base, stride), outs)
        positions = stride * np.arange(phases)[:, None] + slide.dilation * np.arange(size) - low
        elements, between = np.divmod(positions, base)
        phase, window_position = np.nonzero(between == 0)
        elements = elements[phase, window_position]
        start = int(elements.min()) if elements.size else 0
        dilation = int(np.gcd.reduce(elements - start)) or 1
        tap = (elements - start) // dilation
        taps = np.full((phases, int(tap.max(initial=0)) + 1), size)
        taps[phase, tap] = window_position
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
        """The number of elements from the first in a window to the last."""
        return self.stride * (self.outs - 1) + self.dilation * (self.count - 1) + 1

    @property
    def growth(self) -> float:
        """The factor by which `unfolded` makes an operand larger."""
        return self.outs * self.count / self.span

    def cropped(self, x: tf.Tensor, at: int) -> tf.Tensor:
        """Returns the operand with exactly the elements in windows, padded with zeros."""
        return between(x, at, self.start, self.start + self.span, tf.zeros([], x.dtype))

    def to_slide(self, x: tf.Tensor, at: int) -> tuple[tf.Tensor, Mapping[Axis, int]]:
        """Returns the operand for a kernel that slides."""
        return self.cropped(x, at), {("x", self.number): self.span}

    def unfolded(self, x: tf.Tensor, at: int) -> tuple[tf.Tensor, Mapping[Axis, int]]:
        """Returns the operand's element for each position of the result and each tap (im2col)."""
        x, number = self.cropped(x, at), self.number
        if self.slides:
            taps = self.dilation * np.arange(self.count)
            index = self.stride * np.arange(self.outs)[:, None] + taps
            x = tf.gather(x, index.reshape(-1).astype(np.int32), axis=at)
        else:
            x = strided(x, at, self.stride if self.outs > 1 else self.dilation)
        return x, {("outs", number): self.outs, ("taps", number): self.count}

    def tapped(self, filters: tf.Tensor, at: int) -> tuple[tf.Tensor, Mapping[Axis, int]]:
        """Returns filters with the axes phases and taps instead of their window."""
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
    """Returns positions start to stop along an axis, with `fill` outside of the tensor."""
    size = x.shape[at]
    if stop > 0 and start < size:
        return xp.pad_axis(x, at, -start, stop - size, fill)
    sizes = x.shape.as_list()
    sizes[at] = stop - start
    return tf.fill(sizes, fill)


def strided(x: tf.Tensor, at: int, step: int) -> tf.Tensor:
    """Returns every `step`-th position along an axis, from the first on."""
    return x if step == 1 else x[(slice(None),) * at + (slice(None, None, step),)]


def _computable(x: tf.Tensor) -> tf.Tensor:
    """Returns a tensor in a dtype that TensorFlow multiplies."""
    return tf.cast(x, tf.int64) if x.dtype == tf.uint64 else widened(x)


def _by_kernel(windows: Sequence[_Window], grouped: bool, dtype: tf.DType) -> list[_Window]:
    """Returns the windows for a kernel that slides: those whose operand would grow most."""
    if not dtype.is_floating:
        return []
    slid = sorted((w for w in windows if w.slides), key=lambda window: -window.growth)[:3]
    if grouped or any(window.dilation > 1 for window in slid):
        slid = slid[:2]
    return sorted(slid, key=lambda window: window.number)


def _changed(x: tf.Tensor, shape: Shape, changes: Mapping[str, _Change]) -> _Axes:
    """Returns a tensor after changes of some of its dims, given by name."""
    sizes: dict[Axis, int] = {}
    for at, dim in enumerate(shape):
        axes: Mapping[Axis, int] = {dim.name: dim.size}
        if dim.name in changes:
            x, axes = changes[dim.name](x, at)
        sizes |= axes
    return _Axes(x, sizes)


def _product(x: _Axes, filters: _Axes, group: Sequence[str], windows: Sequence[_Window]) -> _Axes:
    """Returns the product, summed over common axes except `group`, and over taps of `windows`."""
    slid, taps, outs = ([(name, w.number) for w in windows] for name in ("x", "taps", "outs"))
    batch = [a for a in x.sizes if a not in filters.sizes and a not in slid]
    summed = [a for a in x.sizes if a in filters.sizes and a not in group]
    features = [a for a in filters.sizes if a not in x.sizes and a not in taps]
    if windows:
        data = x.merged([batch, *([a] for a in slid), [*group, *summed]])
        kernel = filters.merged([*([a] for a in taps), summed, [*group, *features]])
        product = _slide(data, kernel, windows)
        axes = [*batch, *outs, *group, *features]
    else:
        data, kernel = x.merged([group, batch, summed]), filters.merged([group, summed, features])
        product, axes = tf.matmul(data, kernel), [*group, *batch, *features]
    sizes = {**filters.sizes, **x.sizes}
    sizes |= {("outs", window.number): window.outs for window in windows}
    return _Axes(product, {axis: sizes[axis] for axis in axes})


def _slide(data: tf.Tensor, kernel: tf.Tensor, windows: Sequence[_Window]) -> tf.Tensor:
    """Returns a convolution [batch, *outs, features] of data [batch, *x, summed] and a kernel."""
    strides, dilations = [w.stride for w in windows], [w.dilation for w in windows]
    if len(windows) == 1:
        data, kernel = tf.expand_dims(data, 1), tf.expand_dims(kernel, 0)
        strides, dilations = [1, *strides], [1, *dilations]
    slide = tf.nn.conv3d if len(windows) == 3 else tf.nn.conv2d
    return slide(data, kernel, [1, *strides, 1], "VALID", dilations=[1, *dilations, 1])


def _as_output(product: _Axes, slides: Sequence[Slide], out: Shape) -> tf.Tensor:
    """Returns a product with the dims of the result; the phases of a slide are interleaved."""
    roles: dict[str, list[Axis]] = {name: [name] for name in out.names}
    for number, slide in enumerate(slides):
        roles[slide.out] = [("outs", number), ("phases", number)]
    array = product.merged(roles.values())
    for at, dim in enumerate(out):
        array = xp.slice_axis(array, 0, dim.size, at)
    reversed_axes = [out.position(slide.out) for slide in slides if slide.stride < 0]
    return tf.reverse(array, reversed_axes) if reversed_axes else array


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
    slid = _by_kernel(windows, any(dim.size > 1 for dim in group), data.dtype)
    of_data = {
        s.x: w.to_slide if w in slid else w.unfolded for s, w in zip(slides, windows, strict=True)
    }
    of_kernel = {s.window: w.tapped for s, w in zip(slides, windows, strict=True)}
    x, filters = _changed(data, left, of_data), _changed(kernel, right, of_kernel)
    product = _product(x, filters, [dim.name for dim in group], slid)
    return tf.cast(_as_output(product, slides, out.local), out.dtype)


EMITTERS: Mapping[str, Emitter] = {
    "convolve": _convolve,
}
