"""Products with sliding windows: XLA's convolution, by roles of the dims."""

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
    """Dims merged by role, in the order in which the roles come first in a shape.

    Attributes:
        names: all dims, those of a role side by side.
        sizes: of the roles, in that order.
        places: for each role, its place.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    places: tuple[int, ...]


def _merged(shape: Shape, roles: Roles) -> Merged:
    def first(role: int) -> int:
        return min((shape.position(name) for name in roles[role]), default=len(shape))

    order = sorted(range(len(roles)), key=first)
    sizes = [math.prod(shape.get(name).size for name in roles[role]) for role in order]
    names = [name for role in order for name in roles[role]]
    return Merged(tuple(names), tuple(sizes), tuple(map(order.index, range(len(roles)))))


def _laid(array: Any, shape: Shape, merged: Merged) -> Any:
    order = [shape.position(name) for name in merged.names]
    return jnp.asarray(array).transpose(order).reshape(merged.sizes)


def _convolve(machine: Machine, instruction: Instruction, inputs: Arrays) -> Any:
    (x, filters), (out,) = instruction.inputs, instruction.outputs
    slides = parameters_of(instruction, Convolve)["slides"]
    left = x.local.without(s.x for s in slides).names
    right = filters.local.without(s.window for s in slides).names
    result = out.local.without(s.out for s in slides).names
    group = [n for n in left if n in right and n in result]
    summed = [n for n in left if n in right and n not in result]
    batch = [n for n in left if n not in right]
    made = [n for n in right if n not in left]
    lhs = _merged(x.local, [batch, group + summed, *([s.x] for s in slides)])
    rhs = _merged(filters.local, [group + made, summed, *([s.window] for s in slides)])
    end = _merged(out.local, [batch, group + made, *([s.out] for s in slides)])
    data = _laid(inputs[0], x.local, lhs)
    window = _laid(inputs[1], filters.local, rhs)
    windows = [_Window(slide, x.local, filters.local, out.local) for slide in slides]
    turned = [p for p, w in zip(rhs.places[2:], windows, strict=True) if w.slide.dilation < 0]
    found = lax.conv_general_dilated(
        data,
        lax.rev(window, turned) if turned else window,
        window_strides=[abs(w.slide.stride) for w in windows],
        padding=[w.padding for w in windows],
        lhs_dilation=[w.slide.base for w in windows],
        rhs_dilation=[abs(w.slide.dilation) for w in windows],
        dimension_numbers=lax.ConvDimensionNumbers(lhs.places, rhs.places, end.places),
        feature_group_count=math.prod(x.local.get(n).size for n in group),
        preferred_element_type=None if x.dtype == out.dtype else out.dtype,
    )
    backwards = [p for p, w in zip(end.places[2:], windows, strict=True) if w.slide.stride < 0]
    if backwards:
        found = lax.rev(found, backwards)
    dims = Shape(out.local.get(name) for name in end.names)
    return found.reshape(dims.sizes).transpose([dims.position(n) for n in out.local.names])


class _Window:
    """A slide, with the zeros around the operand that let it fit as often as asked for."""

    def __init__(self, slide: Slide, x: Shape, window: Shape, out: Shape) -> None:
        outs, size = out.get(slide.out).size, window.get(slide.window).size
        first, last = slide.reach(outs, size)
        self.slide = slide
        self.padding = (-first, last - (x.get(slide.x).size - 1) * slide.base)


EMITTERS: Mapping[str, Emitter] = {
    "convolve": _convolve,
}
