"""What sliding windows see, reduced; and compared with."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import jax.numpy as jnp
from jax import lax

from meshdsl.lowering.backends.common.arrange import align
from meshdsl.lowering.backends.jax import namespace as xp
from meshdsl.lowering.backends.jax.machine import Arrays, Emitter, Machine
from meshdsl.lowering.parameters import Pool, WindowMatch, parameters_of
from meshdsl.lowering.program import Instruction
from meshdsl.tensors.dims import Shape
from meshdsl.tensors.dtypes import identity


def _padded(instruction: Instruction, number: int, array: Any, fill: Any) -> Any:
    """Lays an operand as the result, with all that the windows meet, and nothing more."""
    have, out = instruction.inputs[number].local, instruction.outputs[0].local
    array = align(xp, jnp.asarray(array), have, Shape(have.get(name) for name in out.names))
    around = [(0, 0, 0)] * array.ndim
    params = parameters_of(instruction, Pool)
    for slide, size in zip(params["slides"], params["sizes"], strict=True):
        at = out.position(slide.out)
        first, last = slide.reach(out[at].size, size)
        after = last - (array.shape[at] - 1) * slide.base
        around[at] = (-first, after, slide.base - 1)
    if all(pads == (0, 0, 0) for pads in around):
        return array
    return lax.pad(array, jnp.asarray(fill, array.dtype), around)


def _reduction(function: Any, fill: Any) -> Emitter:
    def emit(machine: Machine, instruction: Instruction, inputs: Arrays) -> Any:
        (out,), params = instruction.outputs, parameters_of(instruction, Pool)
        if function is lax.add and _repeats(instruction):
            return _repeated(instruction, inputs[0])
        start = jnp.asarray(fill(out.dtype), out.dtype)
        x = _padded(instruction, 0, inputs[0], start)
        size, stride, dilation = ([1] * x.ndim for _ in range(3))
        for slide, window in zip(params["slides"], params["sizes"], strict=True):
            at = out.local.position(slide.out)
            size[at], stride[at], dilation[at] = window, slide.stride, slide.dilation
        found = lax.reduce_window(
            x, start, function, size, stride, "VALID", window_dilation=dilation
        )
        return found

    return emit


def _repeats(instruction: Instruction) -> bool:
    """Whether every window is as long as the elements are apart, so that it sees one of them."""
    params = parameters_of(instruction, Pool)
    return all(
        slide.base == size and slide.stride == slide.dilation == 1
        for slide, size in zip(params["slides"], params["sizes"], strict=True)
    )


def _repeated(instruction: Instruction, array: Any) -> Any:
    have, out = instruction.inputs[0].local, instruction.outputs[0].local
    array = align(xp, jnp.asarray(array), have, Shape(have.get(name) for name in out.names))
    around = [(0, 0, 0)] * array.ndim
    for slide in parameters_of(instruction, Pool)["slides"]:
        at = out.position(slide.out)
        before = slide.low - (slide.base - 1)
        around[at] = (before, out[at].size - before - array.shape[at] * slide.base, 0)
        array = jnp.repeat(array, slide.base, at)
    return lax.pad(array, jnp.zeros((), array.dtype), around)


def _taps(instruction: Instruction, number: int, array: Any, fill: Any) -> Iterator[Any]:
    """Yields, for each position of the window, what it sees from all positions of the result."""
    params, out = parameters_of(instruction, Pool), instruction.outputs[0].local
    padded = _padded(instruction, number, array, fill)
    slides = params["slides"]
    for places in itertools.product(*map(range, params["sizes"])):
        start, limit, stride = [0] * padded.ndim, list(padded.shape), [1] * padded.ndim
        for slide, size, place in zip(slides, params["sizes"], places, strict=True):
            at = out.position(slide.out)
            first, _ = slide.reach(out[at].size, size)
            start[at] = slide.dilation * place - slide.low - first
            limit[at] = start[at] + (out[at].size - 1) * slide.stride + 1
            stride[at] = slide.stride
        yield lax.slice(padded, start, limit, stride)


def _match(machine: Machine, instruction: Instruction, inputs: Arrays) -> Any:
    (out,), params = instruction.outputs, parameters_of(instruction, WindowMatch)
    here = align(xp, jnp.asarray(inputs[0]), instruction.inputs[0].local, out.local)
    amounts = _taps(instruction, 2, inputs[2], 0) if inputs[2:] else itertools.repeat(1)
    total = jnp.zeros(here.shape, "float32" if out.dtype.itemsize < 4 else out.dtype)
    for there, amount in zip(_taps(instruction, 1, inputs[1], jnp.nan), amounts, strict=False):
        highest, other = (here, there) if params["extreme"] == 0 else (there, here)
        slack = jnp.asarray(params["slack"], out.dtype) * jnp.abs(highest)
        equal = (other >= highest - slack) | (other == highest)
        total += jnp.where(equal, amount, 0).astype(total.dtype)
    return total.astype(out.dtype)


EMITTERS: Mapping[str, Emitter] = {
    "window_sum": _reduction(lax.add, functools.partial(identity, "sum")),
    "window_max": _reduction(lax.max, functools.partial(identity, "max")),
    "window_match": _match,
}
