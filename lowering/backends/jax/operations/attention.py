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
    arrived,
    finish,
    gradients,
    pad_up,
    pull,
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
    mixed = jnp.zeros((*rows, part.v.shape[-1]), part.work)
    largest = jnp.full((*rows, 1), HIDDEN, part.work)
    return mixed, largest, jnp.zeros((*rows, 1), part.work)


def forward(this: Attention) -> tuple[jax.Array, jax.Array]:
    """Returns the result and the log-sum-exp of its rows: [*lead, rows, value features or 1]."""
    rows, columns = this.sizes.blocks
    if this.sizes.at_once:
        scores, _ = this.scores()
        largest = jnp.maximum(scores.max(-1, keepdims=True), HIDDEN)
        weights = jnp.exp(scores - largest)
        mixed = this.product("o", s=this.narrow(weights), v=this.v)
        return finish(xp, (mixed, largest, weights.sum(-1, keepdims=True)))
    whole = this.padded(rows, columns)

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
    size = this.q.shape[-2]
    return mixed[..., :size, :], sums[..., :size, :]


def _put(whole: jax.Array, part: jax.Array, start: Any) -> jax.Array:
    return lax.dynamic_update_slice_in_dim(whole, part.astype(whole.dtype), start, whole.ndim - 2)


# Backwards.


def backward(
    this: Attention, mixed: jax.Array, sums: jax.Array, arriving: jax.Array
) -> Sequence[jax.Array]:
    """Returns the gradients by q, k, v, and with `bias_gradient`, by the bias."""
    rows, columns = this.sizes.blocks
    delta = jnp.sum(mixed.astype(this.work) * arriving.astype(this.work), -1, keepdims=True)
    with_bias = this.params["bias_gradient"]
    if this.sizes.at_once:
        *found, to_scores = pull(this, arriving, sums, delta)
        return [*found, sum_to(xp, to_scores, this.masks["bias"].shape)] if with_bias else found
    whole = this.padded(rows, columns)
    arriving, delta = (pad_up(xp, x, -2, rows) for x in (arriving, delta))
    sums = pad_up(xp, sums, -2, rows, -HIDDEN)  # rows that are pads have weights of 0

    def of_rows(i: Any, wholes: tuple) -> tuple:
        row = i * rows
        first = whole.block(row, 0, rows, columns)
        ends = [lax.dynamic_slice_in_dim(x, row, rows, x.ndim - 2) for x in (arriving, sums, delta)]

        def of_columns(j: Any, carry: tuple) -> tuple:
            to_q, to_k, to_v, *to_bias = carry
            column = j * columns
            part = whole.block(row, column, rows, columns)
            more_q, more_k, more_v, to_scores = pull(part, *ends)
            to_k, to_v = _add(to_k, more_k, (column,)), _add(to_v, more_v, (column,))
            to_bias = [
                _add(b, sum_to(xp, to_scores, part.masks["bias"].shape), (row, column))
                for b in to_bias
            ]
            return to_q + more_q, to_k, to_v, *to_bias

        to_q, *rest = wholes
        low, high = first.span(columns)
        start = jnp.zeros(first.q.shape, this.work)
        here, *rest = lax.fori_loop(low, high, of_columns, (start, *rest))
        return (_put(to_q, here, row), *rest)

    zero = tuple(jnp.zeros(x.shape, this.work) for x in whole.targets)
    found = lax.fori_loop(0, whole.q.shape[-2] // rows, of_rows, zero)
    return [
        x[(..., slice(like.shape[-2]), slice(like.shape[-1]))]
        for x, like in zip(found, this.targets, strict=True)
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
    this = Attention.of(xp, instruction, inputs)
    fused = kernel(this, machine.platform)

    def compute() -> Sequence[jax.Array]:
        mixed, sums = fused(this.q, this.k, this.v, True) if fused else forward(this)
        return mixed.astype(this.work), sums.astype(this.work)

    mixed, sums = _if_active(this, compute, (0, HIDDEN))
    return results(this, instruction, mixed, sums)


def _if_active(
    this: Attention, compute: Callable[[], Sequence[jax.Array]], hidden: Sequence[float]
) -> Sequence[jax.Array]:
    """Returns what `compute` does, or what it would find if nothing is seen."""
    if this.active is None:
        return compute()

    def skip() -> list[jax.Array]:
        shapes = jax.eval_shape(lambda: list(compute()))
        return [jnp.full(s.shape, x, s.dtype) for s, x in zip(shapes, hidden, strict=False)]

    return lax.cond(this.active, lambda: list(compute()), skip)


def _gradient(machine: Machine, instruction: Instruction, inputs: Arrays) -> list[jax.Array]:
    this = Attention.of(xp, instruction, inputs)
    mixed, sums, arriving = arrived(xp, instruction, inputs)
    # A kernel makes the log-sum-exp again, of what it sees; blocks use the one that is given.
    fused = None if this.params.get("part") else kernel(this, machine.platform)

    def compute() -> Sequence[jax.Array]:
        if fused:
            return fused_gradients(fused, this, sums, arriving)
        return backward(this, mixed, sums, arriving)

    return gradients(this, instruction, _if_active(this, compute, (0,) * 4))


EMITTERS: Mapping[str, Emitter] = {
    "attention": _attention,
    "attention_gradient": _gradient,
}
