"""Pooling: reductions over sliding windows, and the elements that equal their maximum."""

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
    """Returns an operand with the dims of the result, and exactly the positions in windows."""
    have, out = instruction.inputs[number].local, instruction.outputs[0].local
    array = align(xp, jnp.asarray(array), have, Shape(have.get(name) for name in out.names))
    padding = [(0, 0, 0)] * array.ndim
    params = parameters_of(instruction, Pool)
    for slide, size in zip(params["slides"], params["sizes"], strict=True):
        at = out.position(slide.out)
        first, last = slide.reach(out[at].size, size)
        after = last - (array.shape[at] - 1) * slide.base
        padding[at] = (-first, after, slide.base - 1)
    if all(pads == (0, 0, 0) for pads in padding):
        return array
    return lax.pad(array, jnp.asarray(fill, array.dtype), padding)


def _reduction(function: Any, fill: Any) -> Emitter:
    """Returns the emitter of a reduction of windows; `fill` is its neutral element."""

    def emit(machine: Machine, instruction: Instruction, inputs: Arrays) -> Any:
        (out,), params = instruction.outputs, parameters_of(instruction, Pool)
        if function is lax.add and _is_repetition(instruction):
            return _repeated(instruction, inputs[0])
        start = jnp.asarray(fill(out.dtype), out.dtype)
        x = _padded(instruction, 0, inputs[0], start)
        size, stride, dilation = ([1] * x.ndim for _ in range(3))
        for slide, window in zip(params["slides"], params["sizes"], strict=True):
            at = out.local.position(slide.out)
            size[at], stride[at], dilation[at] = window, slide.stride, slide.dilation
        result = lax.reduce_window(
            x, start, function, size, stride, "VALID", window_dilation=dilation
        )
        return result

    return emit


def _is_repetition(instruction: Instruction) -> bool:
    """Whether windows are as long as elements are apart, so that each has exactly one of them."""
    params = parameters_of(instruction, Pool)
    return all(
        slide.base == size and slide.stride == slide.dilation == 1
        for slide, size in zip(params["slides"], params["sizes"], strict=True)
    )


def _repeated(instruction: Instruction, array: Any) -> Any:
    """Returns each element repeated `base` times: the sums of windows as in `_is_repetition`."""
    have, out = instruction.inputs[0].local, instruction.outputs[0].local
    array = align(xp, jnp.asarray(array), have, Shape(have.get(name) for name in out.names))
    padding = [(0, 0, 0)] * array.ndim
    for slide in parameters_of(instruction, Pool)["slides"]:
        at = out.position(slide.out)
        before = slide.low - (slide.base - 1)
        padding[at] = (before, out[at].size - before - array.shape[at] * slide.base, 0)
        array = jnp.repeat(array, slide.base, at)
    return lax.pad(array, jnp.zeros((), array.dtype), padding)


def _taps(instruction: Instruction, number: int, array: Any, fill: Any) -> Iterator[Any]:
    """Yields, for each position of the window, its elements at all positions of the result."""
    params, out = parameters_of(instruction, Pool), instruction.outputs[0].local
    padded = _padded(instruction, number, array, fill)
    slides = params["slides"]
    for positions in itertools.product(*map(range, params["sizes"])):
        start, limit, stride = [0] * padded.ndim, list(padded.shape), [1] * padded.ndim
        for slide, size, position in zip(slides, params["sizes"], positions, strict=True):
            at = out.position(slide.out)
            first, _ = slide.reach(out[at].size, size)
            start[at] = slide.dilation * position - slide.low - first
            limit[at] = start[at] + (out[at].size - 1) * slide.stride + 1
            stride[at] = slide.stride
        yield lax.slice(padded, start, limit, stride)


def _match(machine: Machine, instruction: Instruction, inputs: Arrays) -> Any:
    """Sums over each window the amounts, or ones, where an element equals the maximum.

    The parameter `extreme` says which operand has the maxima: 0: the first, else the second.
    """
    (out,), params = instruction.outputs, parameters_of(instruction, WindowMatch)
    left = align(xp, jnp.asarray(inputs[0]), instruction.inputs[0].local, out.local)
    amounts = _taps(instruction, 2, inputs[2], 0) if inputs[2:] else itertools.repeat(1)
    total = jnp.zeros(left.shape, "float32" if out.dtype.itemsize < 4 else out.dtype)
    for right, amount in zip(_taps(instruction, 1, inputs[1], jnp.nan), amounts, strict=False):
        highest, candidate = (left, right) if params["extreme"] == 0 else (right, left)
        slack = jnp.asarray(params["slack"], out.dtype) * jnp.abs(highest)
        equal = (candidate >= highest - slack) | (candidate == highest)
        total += jnp.where(equal, amount, 0).astype(total.dtype)
    return total.astype(out.dtype)


EMITTERS: Mapping[str, Emitter] = {
    "window_sum": _reduction(lax.add, functools.partial(identity, "sum")),
    "window_max": _reduction(lax.max, functools.partial(identity, "max")),
    "window_match": _match,
}
