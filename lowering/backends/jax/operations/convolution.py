"""Convolutions, with XLA's convolution: dims are merged by their roles in it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from meshdsl.lowering.backends.jax.machine import Arrays, Emitter, Machine
from meshdsl.lowering.parameters import Convolve, parameters_of
from meshdsl.lowering.program import Instruction
from meshdsl.tensors.dims import Shape
from meshdsl.tensors.slide import Slide

Roles = Sequence[Sequence[str]]


class Merged(NamedTuple):
    """The order of dims in which those of a role are adjacent, and can be merged into one axis.

    Roles keep the order of their first dims in the shape.

    Attributes:
        names: of all dims, in the order.
        sizes: of the merged axes.
        axes: the merged axis of each role.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    axes: tuple[int, ...]


def _merged(shape: Shape, roles: Roles) -> Merged:
    """Returns the order of dims and the merged axes for the roles of a shape."""

    def first(role: int) -> int:
        return min((shape.position(name) for name in roles[role]), default=len(shape))

    order = sorted(range(len(roles)), key=first)
    sizes = [math.prod(shape.get(name).size for name in roles[role]) for role in order]
    names = [name for role in order for name in roles[role]]
    return Merged(tuple(names), tuple(sizes), tuple(map(order.index, range(len(roles)))))


def _arranged(array: Any, shape: Shape, merged: Merged) -> Any:
    """Returns an array with an axis for each role."""
    order = [shape.position(name) for name in merged.names]
    return jnp.asarray(array).transpose(order).reshape(merged.sizes)


def _convolve(machine: Machine, instruction: Instruction, inputs: Arrays) -> Any:
    (x, filters), (out,) = instruction.inputs, instruction.outputs
    slides = parameters_of(instruction, Convolve)["slides"]
    left = x.local.without(s.x for s in slides).names
    right = filters.local.without(s.window for s in slides).names
    result = out.local.without(s.out for s in slides).names
    # The roles of dims that no window slides along, by the operands and results that have them.
    group = [n for n in left if n in right and n in result]
    summed = [n for n in left if n in right and n not in result]
    batch = [n for n in left if n not in right]
    features = [n for n in right if n not in left]
    lhs = _merged(x.local, [batch, group + summed, *([s.x] for s in slides)])
    rhs = _merged(filters.local, [group + features, summed, *([s.window] for s in slides)])
    merged_out = _merged(out.local, [batch, group + features, *([s.out] for s in slides)])
    data = _arranged(inputs[0], x.local, lhs)
    window = _arranged(inputs[1], filters.local, rhs)
    windows = [_Window(slide, x.local, filters.local, out.local) for slide in slides]
    flipped = [p for p, w in zip(rhs.axes[2:], windows, strict=True) if w.slide.dilation < 0]
    window = lax.rev(window, flipped) if flipped else window
    for p, w in zip(rhs.axes[2:], windows, strict=True):
        if w.end - w.first < window.shape[p]:
            window = lax.slice_in_dim(window, w.first, w.end, axis=p)
    product = lax.conv_general_dilated(
        data,
        window,
        window_strides=[abs(w.slide.stride) for w in windows],
        padding=[w.padding for w in windows],
        lhs_dilation=[w.slide.base for w in windows],
        rhs_dilation=[abs(w.slide.dilation) for w in windows],
        dimension_numbers=lax.ConvDimensionNumbers(lhs.axes, rhs.axes, merged_out.axes),
        feature_group_count=math.prod(x.local.get(n).size for n in group),
        preferred_element_type=None if x.dtype == out.dtype else out.dtype,
    )
    reversed_axes = [
        p for p, w in zip(merged_out.axes[2:], windows, strict=True) if w.slide.stride < 0
    ]
    if reversed_axes:
        product = lax.rev(product, reversed_axes)
    dims = Shape(out.local.get(name) for name in merged_out.names)
    return product.reshape(dims.sizes).transpose([dims.position(n) for n in out.local.names])


class _Window:
    """A slide, with the padding of the operand that gives the result's number of windows.

    Attributes:
        first, end: the positions of the window, in rising order of those of the operand, that meet
            more than padding. XLA:CPU (jaxlib 0.10.2) cuts the others off by itself, and ends the
            process if the operand has zeros between its elements along another dim.
        padding: of the operand, for these.
    """

    def __init__(self, slide: Slide, x: Shape, window: Shape, out: Shape) -> None:
        outs, size = out.get(slide.out).size, window.get(slide.window).size
        low, high = slide.reach(outs, size)
        last = (x.get(slide.x).size - 1) * slide.base
        stride, step = abs(slide.stride), abs(slide.dilation)

        def meets(w: int) -> bool:  # of results, one begins where position w is inside of x
            nearest = max(0, -((low + w * step) // stride))
            return nearest < outs and low + w * step + nearest * stride <= last

        self.slide = slide
        self.first = next((w for w in range(size) if meets(w)), 0)
        self.end = next((w for w in reversed(range(size)) if meets(w)), size - 1) + 1
        self.padding = -low - self.first * step, high - last - (size - self.end) * step


EMITTERS: Mapping[str, Emitter] = {
    "convolve": _convolve,
}
