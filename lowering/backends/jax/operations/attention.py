"""Attention on one device: a fused kernel if the platform has one that fits, else blocks of scores.

`common.attention` says what is computed for a block. Blocks of which all scores are hidden, by
`causal` or a window, are skipped. If there are few scores, they are one block.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from meshdsl.lowering.backends.common.attention import (
    HIDDEN,
    Attention,
    Parts,
    accumulate,
    block_gradients,
    finish,
    gradient_operands,
    gradients,
    pad_up,
    results,
    sum_to,
)
from meshdsl.lowering.backends.jax import namespace as xp
from meshdsl.lowering.backends.jax.machine import Arrays, Emitter, Machine
from meshdsl.lowering.backends.jax.operations.attention_fused import kernel
from meshdsl.lowering.program import Instruction


def _in_parts(
    attention: Attention,
    beside: Sequence[jax.Array],
    compute: Callable[..., Sequence[jax.Array]],
    shapes: Sequence[Sequence[int]],
) -> list[jax.Array]:
    """Returns what `compute` returns, called for one part of the batches and heads after the other.

    Args:
        beside: arrays that `compute` takes after the attention: [*lead, ...].
        shapes: those of the results (see `Parts`).
    """
    parts = Parts.of(attention, shapes)
    if parts is None:
        return list(compute(attention, *beside))
    axis, summed = parts.axis, parts.summed

    def step(totals: list[jax.Array], start: jax.Array) -> tuple[list, list]:
        slices = [lax.dynamic_slice_in_dim(x, start, parts.size, axis) for x in beside]
        results = _in_parts(attention.part(axis, start), slices, compute, parts.shapes)
        terms = itertools.compress(results, summed)
        added = [total + term for total, term in zip(totals, terms, strict=True)]
        return added, [x for x, is_sum in zip(results, summed, strict=True) if not is_sum]

    zeros = [jnp.zeros(s, attention.sum_dtype) for s in itertools.compress(shapes, summed)]
    starts = parts.size * jnp.arange(parts.count)
    totals, stacked = map(iter, lax.scan(step, zeros, starts))
    return [
        next(totals) if is_sum else jnp.moveaxis(next(stacked), 0, axis).reshape(shape)
        for shape, is_sum in zip(shapes, summed, strict=True)
    ]


# The forward pass.


def _start(part: Attention) -> tuple:
    """Returns the result, maximum and sum of rows before the first block of columns."""
    rows = part.q.shape[:-1]
    result = jnp.zeros((*rows, part.v.shape[-1]), part.sum_dtype)
    largest = jnp.full((*rows, 1), HIDDEN, part.sum_dtype)
    return result, largest, jnp.zeros((*rows, 1), part.sum_dtype)


def forward(attention: Attention) -> list[jax.Array]:
    """Returns the result and the log-sum-exp of its rows: [*lead, rows, value features or 1]."""
    lead = attention.q.shape[:-1]
    shapes = [(*lead, attention.v.shape[-1]), (*lead, 1)]
    return _in_parts(attention, [], _forward, shapes)


def _forward(attention: Attention) -> tuple[jax.Array, jax.Array]:
    rows, columns = attention.sizes.blocks
    if attention.sizes.at_once:
        scores, _ = attention.scores()
        largest = jnp.maximum(scores.max(-1, keepdims=True), HIDDEN)
        weights = jnp.exp(scores - largest)
        result = attention.product("o", s=attention.narrow(weights), v=attention.v)
        return finish(xp, (result, largest, weights.sum(-1, keepdims=True)))
    padded = attention.padded(rows, columns)

    def of_rows(i: Any, written: tuple) -> tuple:
        row = i * rows
        first = padded.block(row, 0, rows, columns)

        def of_columns(j: Any, carry: tuple) -> tuple:
            return accumulate(padded.block(row, j * columns, rows, columns), carry)

        low, high = first.span(columns)
        finished = finish(xp, lax.fori_loop(low, high, of_columns, _start(first)))
        return tuple(_write_rows(x, part, row) for x, part in zip(written, finished, strict=True))

    result, _, sums = _start(padded)
    count = padded.q.shape[-2] // rows
    result, sums = lax.fori_loop(0, count, of_rows, (result, sums))
    size = attention.q.shape[-2]
    return result[..., :size, :], sums[..., :size, :]


def _write_rows(x: jax.Array, part: jax.Array, start: Any) -> jax.Array:
    return lax.dynamic_update_slice_in_dim(x, part.astype(x.dtype), start, x.ndim - 2)


# The backward pass.


def backward(
    attention: Attention, result: jax.Array, sums: jax.Array, cotangent: jax.Array
) -> Sequence[jax.Array]:
    """Returns the gradients by q, k, v, and with `bias_gradient` by the bias."""
    shapes = [x.shape for x in attention.targets]
    return _in_parts(attention, [result, sums, cotangent], _backward, shapes)


def _backward(
    attention: Attention, result: jax.Array, sums: jax.Array, cotangent: jax.Array
) -> Sequence[jax.Array]:
    rows, columns = attention.sizes.blocks
    delta = jnp.sum(
        result.astype(attention.sum_dtype) * cotangent.astype(attention.sum_dtype),
        -1,
        keepdims=True,
    )
    with_bias = attention.params["bias_gradient"]
    if attention.sizes.at_once:
        *grads, grad_scores = block_gradients(attention, cotangent, sums, delta)
        if with_bias:
            grads.append(sum_to(xp, grad_scores, attention.masks["bias"].shape))
        return grads
    padded = attention.padded(rows, columns)
    cotangent, delta = (pad_up(xp, x, -2, rows) for x in (cotangent, delta))
    sums = pad_up(xp, sums, -2, rows, -HIDDEN)  # padded rows have weights of 0

    def of_rows(i: Any, grads: tuple) -> tuple:
        row = i * rows
        first = padded.block(row, 0, rows, columns)
        of_block = [
            lax.dynamic_slice_in_dim(x, row, rows, x.ndim - 2) for x in (cotangent, sums, delta)
        ]

        def of_columns(j: Any, carry: tuple) -> tuple:
            grad_q, grad_k, grad_v, *grad_bias = carry
            column = j * columns
            part = padded.block(row, column, rows, columns)
            more_q, more_k, more_v, grad_scores = block_gradients(part, *of_block)
            grad_k, grad_v = _add(grad_k, more_k, (column,)), _add(grad_v, more_v, (column,))
            grad_bias = [
                _add(b, sum_to(xp, grad_scores, part.masks["bias"].shape), (row, column))
                for b in grad_bias
            ]
            return grad_q + more_q, grad_k, grad_v, *grad_bias

        grad_q, *rest = grads
        low, high = first.span(columns)
        start = jnp.zeros(first.q.shape, attention.sum_dtype)
        block_q, *rest = lax.fori_loop(low, high, of_columns, (start, *rest))
        return (_write_rows(grad_q, block_q, row), *rest)

    zero = tuple(jnp.zeros(x.shape, attention.sum_dtype) for x in padded.targets)
    padded_grads = lax.fori_loop(0, padded.q.shape[-2] // rows, of_rows, zero)
    return [
        x[(..., slice(like.shape[-2]), slice(like.shape[-1]))]
        for x, like in zip(padded_grads, attention.targets, strict=True)
    ]


def _add(x: jax.Array, part: jax.Array, starts: tuple) -> jax.Array:
    """Adds a block to x from some rows, or rows and columns, on; axes of size 1 are broadcast."""
    at = [jnp.int32(0)] * x.ndim
    for axis, start in zip((-2, -1), starts, strict=False):
        if x.shape[axis] > 1:
            at[axis] = jnp.asarray(start, jnp.int32)
    before = lax.dynamic_slice(x, at, part.shape)
    return lax.dynamic_update_slice(x, before + part.astype(x.dtype), at)


# Instructions.


def _attention(machine: Machine, instruction: Instruction, inputs: Arrays) -> list[jax.Array]:
    attention = Attention.of(xp, instruction, inputs)
    fused = kernel(attention, machine.platform)

    def compute() -> Sequence[jax.Array]:
        result, sums = (fused and fused.forward(attention)) or forward(attention)
        return result.astype(attention.sum_dtype), sums.astype(attention.sum_dtype)

    result, sums = _if_active(attention, compute, (0, HIDDEN))
    return results(attention, instruction, result, sums)


def _if_active(
    attention: Attention, compute: Callable[[], Sequence[jax.Array]], fills: Sequence[float]
) -> Sequence[jax.Array]:
    """Returns the arrays of `compute`, or arrays of `fills` if all scores are hidden."""
    if attention.active is None:
        return compute()

    def skip() -> list[jax.Array]:
        shapes = jax.eval_shape(lambda: list(compute()))
        return [jnp.full(s.shape, x, s.dtype) for s, x in zip(shapes, fills, strict=False)]

    return lax.cond(attention.active, lambda: list(compute()), skip)


def _gradient(machine: Machine, instruction: Instruction, inputs: Arrays) -> list[jax.Array]:
    attention = Attention.of(xp, instruction, inputs)
    result, sums, cotangent = gradient_operands(xp, instruction, inputs)
    fused = kernel(attention, machine.platform)

    def compute() -> Sequence[jax.Array]:
        found = fused and fused.gradients(attention, result, sums, cotangent)
        return found or backward(attention, result, sums, cotangent)

    return gradients(attention, instruction, _if_active(attention, compute, (0,) * 4))


EMITTERS: Mapping[str, Emitter] = {
    "attention": _attention,
    "attention_gradient": _gradient,
}
