"""Attention on one device, in blocks of scores: operands, scores, and what a block adds.

The blocks are those of Dao et al. (2022), "FlashAttention": forwards, each block of rows goes once
through the memory and keeps a running maximum and sum; backwards, the scores are made again from
the saved log-sum-exp. The loops over blocks are each framework's. numpy, the reference, has all
scores at once and shares nothing of this.
"""

from __future__ import annotations

import functools
import math
import operator
import string
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from meshdsl.lowering.attention_sizes import AttentionSizes
from meshdsl.lowering.backends.common.arrange import align, lay
from meshdsl.lowering.backends.common.namespace import OneDevice
from meshdsl.lowering.parameters import AttentionGradient, parameters_of
from meshdsl.lowering.program import Instruction, Value
from meshdsl.tensors.dims import Dimension, Shape

HIDDEN = -1e30  # a score that counts as hidden, and the log-sum-exp of none
ROWS, COLUMNS = -2, -1  # axes of the scores


@dataclass(frozen=True, eq=False)
class Attention:
    """An attention instruction with its operands laid out.

    Attributes:
        xp: the functions of the arrays.
        params: the instruction's; only a gradient has those that are a gradient's alone.
        q: [*lead, rows, features].
        k, v: [*lead, columns, features or value features], without the lead dims they lack.
        masks: [*lead, rows, columns], with size 1 for what they lack.
        active: whether anything is seen at all; None: yes.
        start: the global row and column of the first score.
    """

    xp: OneDevice
    params: AttentionGradient
    sizes: AttentionSizes
    words: Mapping[str, str]
    q: Any
    k: Any
    v: Any
    masks: Mapping[str, Any]
    active: Any = None
    start: tuple[Any, Any] = (0, 0)

    @staticmethod
    def of(xp: OneDevice, instruction: Instruction, inputs: Sequence[Any]) -> Attention:
        sizes = AttentionSizes.of(instruction)
        params = parameters_of(instruction, AttentionGradient)
        letters = dict(zip(sizes.lead.names, string.ascii_lowercase, strict=False))

        def word(dims: Shape, end: str) -> str:
            return "".join(letters[name] for name in dims.names) + end

        def beside(which: int) -> Shape:
            """Returns the lead dims that an operand has."""
            return Shape(d for d in sizes.lead if d in instruction.inputs[which].local)

        def laid(which: int, dims: Iterable[Dimension]) -> Any:
            return align(xp, inputs[which], instruction.inputs[which].local, Shape(dims))

        of_k, of_v = beside(1), beside(2)
        words = {
            name: word(sizes.lead, end) for name, end in zip("qso", ("RE", "RC", "RF"), strict=True)
        }
        words |= {"k": word(of_k, "CE"), "v": word(of_v, "CF")}
        v = laid(2, [*of_v, sizes.columns, *sizes.values])
        masks = {n: laid(3 + i, sizes.full) for i, n in enumerate(params["given"])}
        active = masks.pop("active", None)
        return Attention(
            xp,
            params,
            sizes,
            words,
            q=laid(0, [*sizes.lead, sizes.rows, sizes.features]),
            k=laid(1, [*of_k, sizes.columns, sizes.features]),
            v=xp.reshape(v, [*of_v.sizes, sizes.columns.size, sizes.values.volume]),
            masks=masks,
            active=None if active is None else xp.reshape(active, []),
        )

    @property
    def work(self) -> np.dtype:
        """The dtype of scores and sums."""
        return np.dtype("float64" if self.q.dtype == np.dtype("float64") else "float32")

    @property
    def targets(self) -> list[Any]:
        """The operands that a gradient is asked for: q, k, v, and the bias if it is."""
        with_bias = self.params["bias_gradient"]
        return [self.q, self.k, self.v, *([self.masks["bias"]] if with_bias else [])]

    def product(self, out: str, **factors: Any) -> Any:
        """Returns a product of arrays named by their dims, accumulated in `work`."""
        words = ",".join(self.words[name] for name in factors)
        return self.xp.einsum(f"{words}->{self.words[out]}", list(factors.values()), self.work)

    def narrow(self, x: Any) -> Any:
        """Returns numbers in `work` as a factor of products with q, k and v."""
        return self.xp.as_factor(x, self.q)

    def block(self, row: Any, column: Any, rows: int, columns: int) -> Attention:
        """Returns the part with some rows and columns of the scores."""

        def cut(x: Any, axis: int, start: Any, size: int) -> Any:
            return self.xp.slice_axis(x, start, size, len(x.shape) + axis)

        masks = {}
        for name, mask in self.masks.items():
            if mask.shape[ROWS] > 1:
                mask = cut(mask, ROWS, row, rows)
            if mask.shape[COLUMNS] > 1:
                mask = cut(mask, COLUMNS, column, columns)
            masks[name] = mask
        return replace(
            self,
            q=cut(self.q, -2, row, rows),
            k=cut(self.k, -2, column, columns),
            v=cut(self.v, -2, column, columns),
            masks=masks,
            start=(row, column),
        )

    def padded(self, rows: int, columns: int) -> Attention:
        """Returns this with rows and columns up to multiples of a block."""
        pad = functools.partial(pad_up, self.xp)
        masks = {n: pad(pad(mask, ROWS, rows), COLUMNS, columns) for n, mask in self.masks.items()}
        k, v = (pad(x, -2, columns) for x in (self.k, self.v))
        return replace(self, q=pad(self.q, -2, rows), k=k, v=v, masks=masks)

    @cached_property
    def rows(self) -> Any:
        """The positions of the queries."""
        if "positions" in self.masks:
            return self.masks["positions"]
        first = self.start[0] + self.params["offset"]
        return (first + self.xp.arange(self.q.shape[-2]))[:, None]

    @cached_property
    def columns(self) -> Any:
        return self.start[1] + self.xp.arange(self.k.shape[-2])

    def visible(self) -> list[Any]:
        """Returns the masks, all of which must be true."""
        xp, params, masks, found = self.xp, self.params, self.masks, []
        causal, window = params["causal"], params["window"]
        if causal or window is not None:
            behind = xp.difference(self.rows, masks.get("memory_positions", self.columns))
            if causal:
                found.append(behind >= 0)
            if window is not None:
                found.append(xp.abs(behind) < window)
        if "segments" in masks:
            found.append(masks["segments"] == masks["memory_segments"])
        found += [masks[name] for name in ("mask", "present") if name in masks]
        if self.sizes.columns.size % self.k.shape[-2]:
            found.append(self.columns < self.sizes.columns.size)  # the last block has pads
        return found

    def scores(self) -> tuple[Any, Any]:
        """Returns the scores, -inf where hidden, and their slope by the scaled products or None."""
        xp, cap = self.xp, self.params["soft_cap"]
        scores, slope = self.product("s", q=self.q, k=self.k) * self.params["scale"], None
        if cap is not None:
            bent = xp.tanh(scores / cap)
            scores, slope = cap * bent, 1 - bent * bent
        if "bias" in self.masks:
            scores = scores + xp.astype(self.masks["bias"], self.work)
            scores = xp.where(scores <= HIDDEN, -math.inf, scores)
        if seen := self.visible():
            scores = xp.where(functools.reduce(operator.and_, seen), scores, -math.inf)
        return scores, slope

    def span(self, columns: int) -> tuple[Any, Any]:
        """Returns the first block of columns that some row sees, and the one after the last."""
        blocks = math.ceil(self.sizes.columns.size / columns)
        causal, window = self.params["causal"], self.params["window"]
        if not (causal or window is not None) or "memory_positions" in self.masks:
            return 0, blocks
        low, high = self.xp.min(self.rows), self.xp.max(self.rows)
        first = 0 if window is None else (low - window + 1) // columns
        last = high if causal else high + window - 1
        clip = self.xp.clip
        return clip(first, 0, blocks), clip(last // columns + 1, 0, blocks)


def pad_up(xp: OneDevice, array: Any, axis: int, multiple: int, fill: float = 0) -> Any:
    """Returns an array with fills up to a multiple along an axis of more than one element."""
    size = array.shape[axis]
    if size == 1 or size % multiple == 0:
        return array
    widths = [(0, 0)] * len(array.shape)
    widths[axis] = (0, -size % multiple)
    return xp.pad(array, widths, fill)


def sum_to(xp: OneDevice, array: Any, sizes: Sequence[int]) -> Any:
    """Sums over the axes that are of size 1 in `sizes`."""
    axes = tuple(i for i, size in enumerate(sizes) if size == 1 and array.shape[i] != 1)
    return xp.sum(array, axis=axes, keepdims=True) if axes else array


# Forwards.


def accumulate(piece: Attention, carry: Sequence[Any]) -> tuple[Any, Any, Any]:
    """Adds a block of columns to the running result, maximum and sum of its rows."""
    xp, (mixed, largest, total) = piece.xp, carry
    scores, _ = piece.scores()
    higher = xp.maximum(largest, xp.max(scores, axis=-1, keepdims=True))
    weights = xp.exp(scores - higher)
    shrink = xp.exp(largest - higher)
    added = piece.product("o", s=piece.narrow(weights), v=piece.v)
    mixed = mixed * shrink + added
    return mixed, higher, total * shrink + xp.sum(weights, axis=-1, keepdims=True)


def finish(xp: OneDevice, carry: Sequence[Any]) -> tuple[Any, Any]:
    """Returns the result of rows that have met all columns, and their log-sum-exp."""
    mixed, largest, total = carry
    none = total == 0
    safe = xp.where(none, 1, total)
    return mixed / safe, xp.where(none, HIDDEN, largest + xp.log(safe))


# Backwards.


def pull(piece: Attention, arriving: Any, sums: Any, delta: Any) -> tuple[Any, Any, Any, Any]:
    """Returns a block's share of the gradients by q, k, v, and by its biased scores."""
    scores, slope = piece.scores()
    weights = piece.xp.exp(scores - sums)
    to_v = piece.product("v", s=piece.narrow(weights), o=arriving)
    to_scores = weights * (piece.product("s", o=arriving, v=piece.v) - delta)
    to_product = (to_scores if slope is None else to_scores * slope) * piece.params["scale"]
    to_product = piece.narrow(to_product)
    to_q = piece.product("q", s=to_product, k=piece.k)
    return to_q, piece.product("k", s=to_product, q=piece.q), to_v, to_scores


# Instructions.


def arrived(xp: OneDevice, instruction: Instruction, inputs: Sequence[Any]) -> tuple[Any, Any, Any]:
    """Returns the operands of a gradient that the forward pass lacks.

    Returns:
        The result, its log-sum-exp, and its cotangent: [*lead, rows, value features or 1].
    """
    sizes, (out, of_sums, of_out) = AttentionSizes.of(instruction), instruction.inputs[-3:]
    rows = Shape([*sizes.lead, sizes.rows])
    wide = Shape([*rows, *sizes.values])
    flat = [*rows.sizes, sizes.values.volume]
    mixed = xp.reshape(align(xp, inputs[-3], out.local, wide), flat)
    arriving = xp.reshape(align(xp, inputs[-1], of_out.local, wide), flat)
    sums = xp.reshape(align(xp, inputs[-2], of_sums.local, rows), [*rows.sizes, 1])
    return mixed, sums, arriving


def results(this: Attention, instruction: Instruction, mixed: Any, sums: Any) -> list[Any]:
    """Returns the result and its log-sum-exp as the instruction has them."""
    rows, (out, of_sums) = [*this.sizes.lead, this.sizes.rows], instruction.outputs
    dims = [*rows, *this.sizes.values]
    return [_unlay(this.xp, mixed, dims, out), _unlay(this.xp, sums, rows, of_sums)]


def gradients(this: Attention, instruction: Instruction, found: Sequence[Any]) -> list[Any]:
    """Returns the gradients by q, k, v and maybe the bias as the instruction has them."""
    sizes = this.sizes
    rows, columns = [*sizes.lead, sizes.rows], [*sizes.lead, sizes.columns]
    dims: list[Iterable[Dimension]] = [[*rows, sizes.features], [*columns, sizes.features]]
    dims += [[*columns, *sizes.values], sizes.full]
    triples = zip(found, dims, instruction.outputs, strict=False)
    return [_unlay(this.xp, array, own, value) for array, own, value in triples]


def _unlay(xp: OneDevice, array: Any, dims: Iterable[Dimension], value: Value) -> Any:
    """Returns an array with the dims `dims`, some of size 1, as a result has it."""
    kept = Shape(dim for dim in dims if value.local.find(dim.name))
    order = [kept.position(name) for name in value.local.names]
    return xp.astype(lay(xp, xp.reshape(array, kept.sizes), order), value.dtype)
