"""Attention on one device: a fused kernel where the target has one, else blocks of scores.

The blocks are those of Dao et al. (2022), "FlashAttention": forwards, each block of rows goes once
through the memory and keeps a running maximum and sum; backwards, the scores are made again from
the saved log-sum-exp. Blocks that are wholly hidden by `causal` or a window are not visited. Few
scores are one block.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from meshdsl.lowering.backends.common.attention import (
    HIDDEN,
    Attention,
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
from meshdsl.lowering.backends.jax.operations.attention_fused import fused_gradients, kernel
from meshdsl.lowering.program import Instruction

# Forwards.


def _start(part: Attention) -> tuple:
    rows = part.q.shape[:-1]
    mixed = jnp.zeros((*rows, part.v.shape[-1]), part.sum_dtype)
    largest = jnp.full((*rows, 1), HIDDEN, part.sum_dtype)
    return mixed, largest, jnp.zeros((*rows, 1), part.sum_dtype)


def forward(attention: Attention) -> tuple[jax.Array, jax.Array]:
    """Returns the result and the log-sum-exp of its rows: [*lead, rows, value features or 1]."""
    rows, columns = attention.sizes.blocks
    if attention.sizes.at_once:
        scores, _ = attention.scores()
        largest = jnp.maximum(scores.max(-1, keepdims=True), HIDDEN)
        weights = jnp.exp(scores - largest)
        mixed = attention.product("o", s=attention.narrow(weights), v=attention.v)
        return finish(xp, (mixed, largest, weights.sum(-1, keepdims=True)))
    whole = attention.padded(rows, columns)

    def of_rows(i: Any, wholes: tuple) -> tuple:
        row = i * rows
        first = whole.block(row, 0, rows, columns)

        def of_columns(j: Any, carry: tuple) -> tuple:
            return accumulate(whole.block(row, j * columns, rows, columns), carry)

        low, high = first.span(columns)
        found = finish(xp, lax.fori_loop(low, high, of_columns, _start(first)))
        return tuple(_put(x, part, row) for x, part in zip(wholes, found, strict=True))

    mixed, _, sums = _start(whole)
    count = whole.q.shape[-2] // rows
    mixed, sums = lax.fori_loop(0, count, of_rows, (mixed, sums))
    size = attention.q.shape[-2]
    return mixed[..., :size, :], sums[..., :size, :]


def _put(whole: jax.Array, part: jax.Array, start: Any) -> jax.Array:
    return lax.dynamic_update_slice_in_dim(whole, part.astype(whole.dtype), start, whole.ndim - 2)


# Backwards.


def backward(
    attention: Attention, mixed: jax.Array, sums: jax.Array, cotangent: jax.Array
) -> Sequence[jax.Array]:
    """Returns the gradients by q, k, v, and with `bias_gradient`, by the bias."""
    rows, columns = attention.sizes.blocks
    delta = jnp.sum(
        mixed.astype(attention.sum_dtype) * cotangent.astype(attention.sum_dtype), -1, keepdims=True
    )
    with_bias = attention.params["bias_gradient"]
    if attention.sizes.at_once:
        *found, grad_scores = block_gradients(attention, cotangent, sums, delta)
        return (
            [*found, sum_to(xp, grad_scores, attention.masks["bias"].shape)] if with_bias else found
        )
    whole = attention.padded(rows, columns)
    cotangent, delta = (pad_up(xp, x, -2, rows) for x in (cotangent, delta))
    sums = pad_up(xp, sums, -2, rows, -HIDDEN)  # rows that are pads have weights of 0

    def of_rows(i: Any, wholes: tuple) -> tuple:
        row = i * rows
        first = whole.block(row, 0, rows, columns)
        ends = [
            lax.dynamic_slice_in_dim(x, row, rows, x.ndim - 2) for x in (cotangent, sums, delta)
        ]

        def of_columns(j: Any, carry: tuple) -> tuple:
            grad_q, grad_k, grad_v, *grad_bias = carry
            column = j * columns
            part = whole.block(row, column, rows, columns)
            more_q, more_k, more_v, grad_scores = block_gradients(part, *ends)
            grad_k, grad_v = _add(grad_k, more_k, (column,)), _add(grad_v, more_v, (column,))
            grad_bias = [
                _add(b, sum_to(xp, grad_scores, part.masks["bias"].shape), (row, column))
                for b in grad_bias
            ]
            return grad_q + more_q, grad_k, grad_v, *grad_bias

        grad_q, *rest = wholes
        low, high = first.span(columns)
        start = jnp.zeros(first.q.shape, attention.sum_dtype)
        here, *rest = lax.fori_loop(low, high, of_columns, (start, *rest))
        return (_put(grad_q, here, row), *rest)

    zero = tuple(jnp.zeros(x.shape, attention.sum_dtype) for x in whole.targets)
    found = lax.fori_loop(0, whole.q.shape[-2] // rows, of_rows, zero)
    return [
        x[(..., slice(like.shape[-2]), slice(like.shape[-1]))]
        for x, like in zip(found, attention.targets, strict=True)
    ]


def _add(whole: jax.Array, part: jax.Array, starts: tuple) -> jax.Array:
    """Adds a block at its rows, or its rows and columns, where the whole has more than one."""
    at = [jnp.int32(0)] * whole.ndim
    for axis, start in zip((-2, -1), starts, strict=False):
        if whole.shape[axis] > 1:
            at[axis] = jnp.asarray(start, jnp.int32)
    before = lax.dynamic_slice(whole, at, part.shape)
    return lax.dynamic_update_slice(whole, before + part.astype(whole.dtype), at)


# Instructions.


def _attention(machine: Machine, instruction: Instruction, inputs: Arrays) -> list[jax.Array]:
    attention = Attention.of(xp, instruction, inputs)
    fused = kernel(attention, machine.platform)

    def compute() -> Sequence[jax.Array]:
        mixed, sums = (
            fused(attention.q, attention.k, attention.v, True) if fused else forward(attention)
        )
        return mixed.astype(attention.sum_dtype), sums.astype(attention.sum_dtype)

    mixed, sums = _if_active(attention, compute, (0, HIDDEN))
    return results(attention, instruction, mixed, sums)


def _if_active(
    attention: Attention, compute: Callable[[], Sequence[jax.Array]], hidden: Sequence[float]
) -> Sequence[jax.Array]:
    """Returns what `compute` does, or what it would find if nothing is seen."""
    if attention.active is None:
        return compute()

    def skip() -> list[jax.Array]:
        shapes = jax.eval_shape(lambda: list(compute()))
        return [jnp.full(s.shape, x, s.dtype) for s, x in zip(shapes, hidden, strict=False)]

    return lax.cond(attention.active, lambda: list(compute()), skip)


def _gradient(machine: Machine, instruction: Instruction, inputs: Arrays) -> list[jax.Array]:
    attention = Attention.of(xp, instruction, inputs)
    mixed, sums, cotangent = gradient_operands(xp, instruction, inputs)
    # A kernel makes the log-sum-exp again, of what it sees; blocks use the one that is given.
    fused = None if attention.params.get("part") else kernel(attention, machine.platform)

    def compute() -> Sequence[jax.Array]:
        if fused:
            return fused_gradients(fused, attention, sums, cotangent)
        return backward(attention, mixed, sums, cotangent)

    return gradients(attention, instruction, _if_active(attention, compute, (0,) * 4))


EMITTERS: Mapping[str, Emitter] = {
    "attention": _attention,
    "attention_gradient": _gradient,
}
