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
    bases = [slide.base for slide in slides]
    if math.prod(w.size for w in windows) > math.prod(x.local.get(s.x).size for s in slides):
        # XLA (jaxlib 0.10.2, on CPUs) swaps operand and filters if the filters have more positions.
        # The swap is wrong where the operand is dilated, and ends the process. So the zeros of such
        # an operand, which is small, are written out.
        data = _spread(data, dict(zip(lhs.axes[2:], bases, strict=True)))
        bases = [1] * len(bases)
    flipped = [p for p, w in zip(rhs.axes[2:], windows, strict=True) if w.slide.dilation < 0]
    product = lax.conv_general_dilated(
        data,
        lax.rev(window, flipped) if flipped else window,
        window_strides=[abs(w.slide.stride) for w in windows],
        padding=[w.padding for w in windows],
        lhs_dilation=bases,
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


def _spread(data: Any, bases: Mapping[int, int]) -> Any:
    """Returns an array with `base - 1` zeros between its elements along some axes."""
    if all(base == 1 for base in bases.values()):
        return data
    between = [(0, 0, bases.get(axis, 1) - 1) for axis in range(data.ndim)]
    return lax.pad(data, jnp.zeros((), data.dtype), between)


class _Window:
    """A slide, with the padding of the operand that gives the result's number of windows.

    Attributes:
        size: of the window.
    """

    def __init__(self, slide: Slide, x: Shape, window: Shape, out: Shape) -> None:
        outs, size = out.get(slide.out).size, window.get(slide.window).size
        first, last = slide.reach(outs, size)
        self.slide, self.size = slide, size
        self.padding = (-first, last - (x.get(slide.x).size - 1) * slide.base)


EMITTERS: Mapping[str, Emitter] = {
    "convolve": _convolve,
}
