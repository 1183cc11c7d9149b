"""Attention on one device: a fused kernel where the target has one, else blocks of scores.

The blocks are those of Dao et al. (2022), "FlashAttention": forwards, each block of rows goes once
through the memory and keeps a running maximum and sum; backwards, the scores are made again from
the saved log-sum-exp. Blocks that are wholly hidden by `causal` or a window are not visited. Few
scores are one block.
"""

from __future__ import annotations

import math
import string
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from meshdsl.lowering.attention_sizes import AttentionSizes
from meshdsl.lowering.backends.common.arrange import align
from meshdsl.lowering.backends.jax import namespace as xp
from meshdsl.lowering.backends.jax.machine import Arrays, Emitter, Machine
from meshdsl.lowering.backends.jax.operations.attention_fused import HIDDEN, kernel, pull
from meshdsl.lowering.program import Instruction, Value
from meshdsl.tensors.dims import Dimension, Shape

ROWS, COLUMNS = -2, -1  # axes of the scores


@dataclass(frozen=True)
class Attention:
    """An attention instruction with its operands laid out.

    Attributes:
        q: [*lead, rows, features].
        k, v: [*lead, columns, features or value features], without the lead dims they lack.
        masks: [*lead, rows, columns], with size 1 for what they lack.
        active: whether anything is seen at all; None: yes.
        start: the global row and column of the first score.
    """

    params: Mapping[str, Any]
    sizes: AttentionSizes
    words: Mapping[str, str]
    q: jax.Array
    k: jax.Array
    v: jax.Array
    masks: Mapping[str, jax.Array]
    active: jax.Array | None = None
    start: tuple[Any, Any] = (0, 0)

    @staticmethod
    def of(instruction: Instruction, inputs: Arrays) -> Attention:
        sizes, params = AttentionSizes.of(instruction), instruction.params
        letters = dict(zip(sizes.lead.names, string.ascii_lowercase, strict=False))

        def word(dims: Shape, end: str) -> str:
            return "".join(letters[name] for name in dims.names) + end

        def beside(which: int) -> Shape:
            """Returns the lead dims that an operand has."""
            return Shape(d for d in sizes.lead if d in instruction.inputs[which].local)

        def laid(which: int, dims: Iterable[Dimension]) -> jax.Array:
            return _lay(inputs[which], instruction.inputs[which], dims)

        of_k, of_v = beside(1), beside(2)
        words = {
            name: word(sizes.lead, end) for name, end in zip("qso", ("RE", "RC", "RF"), strict=True)
        }
        words |= {"k": word(of_k, "CE"), "v": word(of_v, "CF")}
        v = laid(2, [*of_v, sizes.columns, *sizes.values])
        masks = {n: laid(3 + i, sizes.full) for i, n in enumerate(params["given"])}
        active = masks.pop("active", None)
        return Attention(
            params,
            sizes,
            words,
            q=laid(0, [*sizes.lead, sizes.rows, sizes.features]),
            k=laid(1, [*of_k, sizes.columns, sizes.features]),
            v=v.reshape(*v.shape[: len(of_v) + 1], -1),
            masks=masks,
            active=None if active is None else active.reshape(()),
        )

    @property
    def work(self) -> Any:
        """The dtype of scores and sums."""
        return jnp.float64 if self.q.dtype == jnp.float64 else jnp.float32

    def product(self, out: str, **factors: jax.Array) -> jax.Array:
        """Returns a product of arrays named by their dims, accumulated in `work`."""
        words = ",".join(self.words[name[0]] for name in factors)
        equation = f"{words}->{self.words[out]}"
        return jnp.einsum(equation, *factors.values(), preferred_element_type=self.work)

    def block(self, row: Any, column: Any, rows: int, columns: int) -> Attention:
        """Returns the part with some rows and columns of the scores."""
        cut = lax.dynamic_slice_in_dim
        masks = {}
        for name, mask in self.masks.items():
            if mask.shape[ROWS] > 1:
                mask = cut(mask, row, rows, mask.ndim + ROWS)
            if mask.shape[COLUMNS] > 1:
                mask = cut(mask, column, columns, mask.ndim + COLUMNS)
            masks[name] = mask
        return replace(
            self,
            q=cut(self.q, row, rows, self.q.ndim - 2),
            k=cut(self.k, column, columns, self.k.ndim - 2),
            v=cut(self.v, column, columns, self.v.ndim - 2),
            masks=masks,
            start=(row, column),
        )

    def padded(self, rows: int, columns: int) -> Attention:
        """Returns this with rows and columns up to multiples of a block."""
        masks = {
            name: _pad(_pad(mask, ROWS, rows), COLUMNS, columns)
            for name, mask in self.masks.items()
        }
        k, v = (_pad(x, -2, columns) for x in (self.k, self.v))
        return replace(self, q=_pad(self.q, -2, rows), k=k, v=v, masks=masks)

    @cached_property
    def rows(self) -> jax.Array:
        """The positions of the queries."""
        if "positions" in self.masks:
            return self.masks["positions"]
        first = self.start[0] + self.params["offset"]
        return (first + jnp.arange(self.q.shape[-2], dtype=jnp.int32))[:, None]

    @cached_property
    def columns(self) -> jax.Array:
        return self.start[1] + jnp.arange(self.k.shape[-2], dtype=jnp.int32)

    def visible(self) -> list[jax.Array]:
        """Returns the masks, all of which must be true."""
        params, masks, found = self.params, self.masks, []
        causal, window = params["causal"], params["window"]
        if causal or window is not None:
            behind = self.rows - masks.get("memory_positions", self.columns)
            if causal:
                found.append(behind >= 0)
            if window is not None:
                found.append(jnp.abs(behind) < window)
        if "segments" in masks:
            found.append(masks["segments"] == masks["memory_segments"])
        found += [masks[name] for name in ("mask", "present") if name in masks]
        if self.sizes.columns.size % self.k.shape[-2]:
            found.append(self.columns < self.sizes.columns.size)  # the last block has pads
        return found

    def scores(self) -> tuple[jax.Array, jax.Array | None]:
        """Returns the scores, -inf where hidden, and their slope by the scaled products."""
        scores, slope = self.product("s", q=self.q, k=self.k) * self.params["scale"], None
        cap = self.params["soft_cap"]
        if cap is not None:
            bent = jnp.tanh(scores / cap)
            scores, slope = cap * bent, 1 - bent * bent
        if "bias" in self.masks:
            scores = scores + self.masks["bias"].astype(self.work)
            scores = jnp.where(scores <= HIDDEN, -jnp.inf, scores)
        seen = self.visible()
        if seen:
            both = seen[0]
            for other in seen[1:]:
                both = both & other
            scores = jnp.where(both, scores, -jnp.inf)
        return scores, slope

    def span(self, columns: int) -> tuple[Any, Any]:
        """Returns the first block of columns that some row sees, and the one after the last."""
        blocks = math.ceil(self.sizes.columns.size / columns)
        causal, window = self.params["causal"], self.params["window"]
        if not (causal or window is not None) or "memory_positions" in self.masks:
            return 0, blocks
        low, high = jnp.min(self.rows), jnp.max(self.rows)
        first = 0 if window is None else (low - window + 1) // columns
        last = high if causal else high + window - 1
        return jnp.clip(first, 0, blocks), jnp.clip(last // columns + 1, 0, blocks)


def _lay(array: Any, value: Value, dims: Any) -> Any:
    return align(xp, array, value.local, Shape(dims))


def _pad(array: jax.Array, axis: int, multiple: int, fill: float = 0) -> jax.Array:
    """Returns an array with fills up to a multiple along an axis of more than one element."""
    size = array.shape[axis]
    if size == 1 or size % multiple == 0:
        return array
    widths = [(0, 0)] * array.ndim
    widths[axis] = (0, -size % multiple)
    return jnp.pad(array, widths, constant_values=fill)


# Forwards.


def _accumulate(part: Attention, carry: tuple) -> tuple:
    """Adds a block of columns to the running result, maximum and sum of its rows."""
    mixed, largest, total = carry
    scores, _ = part.scores()
    higher = jnp.maximum(largest, scores.max(-1, keepdims=True))
    weights = jnp.exp(scores - higher)
    shrink = jnp.exp(largest - higher)
    added = part.product("o", s=weights.astype(part.v.dtype), v=part.v)
    return mixed * shrink + added, higher, total * shrink + weights.sum(-1, keepdims=True)


def _finish(carry: tuple) -> tuple[jax.Array, jax.Array]:
    mixed, largest, total = carry
    none = total == 0
    safe = jnp.where(none, 1, total)
    return mixed / safe, jnp.where(none, HIDDEN, largest + jnp.log(safe))


def _start(part: Attention) -> tuple:
    rows = part.q.shape[:-1]
    mixed = jnp.zeros((*rows, part.v.shape[-1]), part.work)
    largest = jnp.full((*rows, 1), HIDDEN, part.work)
    return mixed, largest, jnp.zeros((*rows, 1), part.work)


def forward(this: Attention) -> tuple[jax.Array, jax.Array]:
    """Returns the result and the log-sum-exp of its rows: [*lead, rows, value features or 1]."""
    rows, columns = this.sizes.blocks
    if (rows, columns) == (this.sizes.rows.size, this.sizes.columns.size):
        scores, _ = this.scores()
        largest = jnp.maximum(scores.max(-1, keepdims=True), HIDDEN)
        weights = jnp.exp(scores - largest)
        mixed = this.product("o", s=weights.astype(this.v.dtype), v=this.v)
        return _finish((mixed, largest, weights.sum(-1, keepdims=True)))
    whole = this.padded(rows, columns)

    def of_rows(i: Any, results: tuple) -> tuple:
        row = i * rows
        first = whole.block(row, 0, rows, columns)

        def of_columns(j: Any, carry: tuple) -> tuple:
            return _accumulate(whole.block(row, j * columns, rows, columns), carry)

        low, high = first.span(columns)
        found = _finish(lax.fori_loop(low, high, of_columns, _start(first)))
        return tuple(_put(x, part, row) for x, part in zip(results, found, strict=True))

    mixed, _, sums = _start(whole)
    count = whole.q.shape[-2] // rows
    mixed, sums = lax.fori_loop(0, count, of_rows, (mixed, sums))
    size = this.q.shape[-2]
    return mixed[..., :size, :], sums[..., :size, :]


def _put(whole: jax.Array, part: jax.Array, start: Any) -> jax.Array:
    return lax.dynamic_update_slice_in_dim(whole, part.astype(whole.dtype), start, whole.ndim - 2)


# Backwards.


def _pull(part: Attention, arriving: jax.Array, sums: jax.Array, delta: jax.Array) -> tuple:
    """Returns a block's share of the gradients by q, k, v, and by its biased scores."""
    scores, slope = part.scores()
    weights = jnp.exp(scores - sums)
    narrow = part.q.dtype
    to_v = part.product("v", s=weights.astype(narrow), o=arriving)
    to_scores = weights * (part.product("s", o=arriving, v=part.v) - delta)
    to_product = (to_scores if slope is None else to_scores * slope) * part.params["scale"]
    to_product = to_product.astype(narrow)
    to_q = part.product("q", s=to_product, k=part.k)
    return to_q, part.product("k", s=to_product, q=part.q), to_v, to_scores


def backward(
    this: Attention, mixed: jax.Array, sums: jax.Array, arriving: jax.Array
) -> Sequence[jax.Array]:
    """Returns the gradients by q, k, v, and with `bias_gradient`, by the bias."""
    rows, columns = this.sizes.blocks
    delta = jnp.sum(mixed.astype(this.work) * arriving.astype(this.work), -1, keepdims=True)
    with_bias = this.params["bias_gradient"]
    if (rows, columns) == (this.sizes.rows.size, this.sizes.columns.size):
        *found, to_scores = _pull(this, arriving, sums, delta)
        return [*found, _sum_to(to_scores, this.masks["bias"].shape)] if with_bias else found
    whole = this.padded(rows, columns)
    arriving, delta = (_pad(x, -2, rows) for x in (arriving, delta))
    sums = _pad(sums, -2, rows, -HIDDEN)  # rows that are pads have weights of 0

    def of_rows(i: Any, results: tuple) -> tuple:
        row = i * rows
        first = whole.block(row, 0, rows, columns)
        ends = [lax.dynamic_slice_in_dim(x, row, rows, x.ndim - 2) for x in (arriving, sums, delta)]

        def of_columns(j: Any, carry: tuple) -> tuple:
            to_q, to_k, to_v, *to_bias = carry
            column = j * columns
            part = whole.block(row, column, rows, columns)
            more_q, more_k, more_v, to_scores = _pull(part, *ends)
            to_k, to_v = _add(to_k, more_k, (column,)), _add(to_v, more_v, (column,))
            to_bias = [
                _add(b, _sum_to(to_scores, part.masks["bias"].shape), (row, column))
                for b in to_bias
            ]
            return to_q + more_q, to_k, to_v, *to_bias

        to_q, *rest = results
        low, high = first.span(columns)
        start = jnp.zeros(first.q.shape, this.work)
        here, *rest = lax.fori_loop(low, high, of_columns, (start, *rest))
        return (_put(to_q, here, row), *rest)

    targets = [whole.q, whole.k, whole.v, *([whole.masks["bias"]] if with_bias else [])]
    zero = tuple(jnp.zeros(x.shape, this.work) for x in targets)
    found = lax.fori_loop(0, whole.q.shape[-2] // rows, of_rows, zero)
    kept = [this.q, this.k, this.v, *([this.masks["bias"]] if with_bias else [])]
    return [
        x[(..., slice(like.shape[-2]), slice(like.shape[-1]))]
        for x, like in zip(found, kept, strict=True)
    ]


def _add(whole: jax.Array, part: jax.Array, starts: tuple) -> jax.Array:
    """Adds a block at its rows, or its rows and columns, where the whole has more than one."""
    at = [jnp.int32(0)] * whole.ndim
    for axis, start in zip((-2, -1), starts, strict=False):
        if whole.shape[axis] > 1:
            at[axis] = jnp.asarray(start, jnp.int32)
    before = lax.dynamic_slice(whole, at, part.shape)
    return lax.dynamic_update_slice(whole, before + part.astype(whole.dtype), at)


def _sum_to(array: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Sums over the axes that are of size 1 in `shape`."""
    axes = tuple(i for i, size in enumerate(shape) if size == 1 and array.shape[i] != 1)
    return array.sum(axes, keepdims=True) if axes else array


# Instructions.


def _unlay(array: jax.Array, dims: Any, value: Value) -> jax.Array:
    """Returns an array with the dims `dims`, some of size 1, as a result has it."""
    dims = Shape(dims)
    kept = Shape(dim for dim in dims if value.local.find(dim.name))
    array = array.reshape(kept.sizes)
    order = [kept.position(name) for name in value.local.names]
    return array.transpose(order).astype(value.dtype)


def _attention(machine: Machine, instruction: Instruction, inputs: Arrays) -> list[jax.Array]:
    this = Attention.of(instruction, inputs)
    sizes = this.sizes
    fused = kernel(this, machine.platform)
    rows = [*sizes.lead, sizes.rows]

    def compute() -> Sequence[jax.Array]:
        mixed, sums = fused(this.q, this.k, this.v, True) if fused else forward(this)
        return mixed.astype(this.work), sums.astype(this.work)

    mixed, sums = _if_active(this, compute, (0, HIDDEN))
    out, of_sums = instruction.outputs
    return [_unlay(mixed, [*rows, *sizes.values], out), _unlay(sums, rows, of_sums)]


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
    this = Attention.of(instruction, inputs)
    sizes = this.sizes
    rows = [*sizes.lead, sizes.rows]
    out, of_sums, of_out = instruction.inputs[-3:]
    flat = (*Shape(rows).sizes, -1)
    mixed = _lay(inputs[-3], out, [*rows, *sizes.values]).reshape(flat)
    arriving = _lay(inputs[-1], of_out, [*rows, *sizes.values]).reshape(flat)
    sums = _lay(inputs[-2], of_sums, rows).reshape(flat)
    # A kernel makes the log-sum-exp again, of what it sees; blocks use the one that is given.
    fused = None if this.params.get("part") else kernel(this, machine.platform)

    def compute() -> Sequence[jax.Array]:
        if fused:
            return pull(fused, this, sums, arriving)
        return backward(this, mixed, sums, arriving)

    found = _if_active(this, compute, (0,) * 4)
    dims = [[*rows, sizes.features], [*sizes.lead, sizes.columns, sizes.features]]
    dims += [[*sizes.lead, sizes.columns, *sizes.values], list(sizes.full)]
    return [
        _unlay(x, d, value) for x, d, value in zip(found, dims, instruction.outputs, strict=False)
    ]


EMITTERS: Mapping[str, Emitter] = {
    "attention": _attention,
    "attention_gradient": _gradient,
}
