"""Attention on one device, in blocks of scores: the operands, the scores, and the sums of a block.

The algorithm is that of Dao et al. (2022), "FlashAttention". The forward pass visits the blocks of
columns once for each block of rows, and keeps a running maximum and sum. The backward pass
recomputes the scores from the saved log-sum-exp. An outer loop visits parts of the batches and
heads, if a block has not all of them. Each framework has its own loops over blocks.
numpy, the reference, computes all scores at once and uses none of this.

Rows are the positions of queries, columns those of keys and values. Lead dims are all others.
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
from meshdsl.lowering.backends.common.arrange import align, permuted
from meshdsl.lowering.backends.common.namespace import OneDevice
from meshdsl.lowering.parameters import AttentionGradient, parameters_of
from meshdsl.lowering.program import Instruction, Value
from meshdsl.tensors.dims import Dimension, Shape

HIDDEN = -1e30  # scores up to this are hidden; also the log-sum-exp of a row without scores
ROWS, COLUMNS = -2, -1  # axes of the scores


@dataclass(frozen=True, eq=False)
class Attention:
    """An attention instruction with its operands in the order of dims that products need.

    Attributes:
        xp: the functions of the arrays.
        params: the instruction's. Keys that only gradients have are missing in the forward pass.
        subscripts: the einsum subscripts of q, k, v, the scores s, and the result o.
        q: [*lead, rows, features].
        k, v: [*lead, columns, features or value features], without the lead dims that they lack.
        masks: [*lead, rows, columns], with size 1 for dims that they lack.
        active: a bool scalar, false if all scores are hidden; None: true.
        start: the row and column of the first score.
    """

    xp: OneDevice
    params: AttentionGradient
    sizes: AttentionSizes
    subscripts: Mapping[str, str]
    q: Any
    k: Any
    v: Any
    masks: Mapping[str, Any]
    active: Any = None
    start: tuple[Any, Any] = (0, 0)

    @staticmethod
    def of(xp: OneDevice, instruction: Instruction, inputs: Sequence[Any]) -> Attention:
        """Returns the operands of an instruction, by name and in the order of products."""
        sizes = AttentionSizes.of(instruction)
        params = parameters_of(instruction, AttentionGradient)
        letters = dict(zip(sizes.lead.names, string.ascii_lowercase, strict=False))

        def subscript(dims: Shape, last: str) -> str:
            return "".join(letters[name] for name in dims.names) + last

        def lead_of(number: int) -> Shape:
            """Returns the lead dims of an operand."""
            return Shape(d for d in sizes.lead if d in instruction.inputs[number].local)

        def aligned(number: int, dims: Iterable[Dimension]) -> Any:
            return align(xp, inputs[number], instruction.inputs[number].local, Shape(dims))

        of_k, of_v = lead_of(1), lead_of(2)
        subscripts = {
            name: subscript(sizes.lead, last)
            for name, last in zip("qso", ("RE", "RC", "RF"), strict=True)
        }
        subscripts |= {"k": subscript(of_k, "CE"), "v": subscript(of_v, "CF")}
        v = aligned(2, [*of_v, sizes.columns, *sizes.values])
        masks = {n: aligned(3 + i, sizes.full) for i, n in enumerate(params["given"])}
        active = masks.pop("active", None)
        return Attention(
            xp,
            params,
            sizes,
            subscripts,
            q=aligned(0, [*sizes.lead, sizes.rows, sizes.features]),
            k=aligned(1, [*of_k, sizes.columns, sizes.features]),
            v=xp.reshape(v, [*of_v.sizes, sizes.columns.size, sizes.values.volume]),
            masks=masks,
            active=None if active is None else xp.reshape(active, []),
        )

    @property
    def sum_dtype(self) -> np.dtype:
        """The dtype of scores and sums: float32, or float64 for operands in it."""
        return np.dtype("float64" if self.q.dtype == np.dtype("float64") else "float32")

    @property
    def targets(self) -> list[Any]:
        """The operands with a gradient: q, k, v, and with `bias_gradient` the bias."""
        with_bias = self.params["bias_gradient"]
        return [self.q, self.k, self.v, *([self.masks["bias"]] if with_bias else [])]

    def product(self, out: str, **factors: Any) -> Any:
        """Returns an einsum, `product("s", q=q, k=k)`, accumulated in `sum_dtype`."""
        inputs = ",".join(self.subscripts[name] for name in factors)
        return self.xp.einsum(
            f"{inputs}->{self.subscripts[out]}", list(factors.values()), self.sum_dtype
        )

    def narrow(self, x: Any) -> Any:
        """Returns numbers in `sum_dtype` as a factor of products with q, k and v."""
        return self.xp.as_factor(x, self.q)

    def block(self, row: Any, column: Any, rows: int, columns: int) -> Attention:
        """Returns the part of the instruction for a block of scores, from a row and a column on."""

        def sliced(x: Any, axis: int, start: Any, size: int) -> Any:
            return self.xp.slice_axis(x, start, size, len(x.shape) + axis)

        masks = {}
        for name, mask in self.masks.items():
            if mask.shape[ROWS] > 1:
                mask = sliced(mask, ROWS, row, rows)
            if mask.shape[COLUMNS] > 1:
                mask = sliced(mask, COLUMNS, column, columns)
            masks[name] = mask
        return replace(
            self,
            q=sliced(self.q, -2, row, rows),
            k=sliced(self.k, -2, column, columns),
            v=sliced(self.v, -2, column, columns),
            masks=masks,
            start=(row, column),
        )

    def part(self, axis: int, start: Any) -> Attention:
        """Returns the part of the instruction for a block's part of a lead dim, from `start` on.

        Args:
            axis: `sizes.divided`. Keys and values have this dim at the same place.
        """
        size = self.sizes.lead_block[axis].size

        def sliced(x: Any) -> Any:
            return x if x.shape[axis] == 1 else self.xp.slice_axis(x, start, size, axis)

        masks = {name: sliced(mask) for name, mask in self.masks.items()}
        q, k, v = (sliced(x) for x in (self.q, self.k, self.v))
        return replace(self, sizes=self.sizes.part(axis), q=q, k=k, v=v, masks=masks)

    def padded(self, rows: int, columns: int) -> Attention:
        """Returns the instruction with rows and columns padded to multiples of a block."""
        pad = functools.partial(pad_up, self.xp)
        masks = {n: pad(pad(mask, ROWS, rows), COLUMNS, columns) for n, mask in self.masks.items()}
        k, v = (pad(x, -2, columns) for x in (self.k, self.v))
        return replace(self, q=pad(self.q, -2, rows), k=k, v=v, masks=masks)

    @cached_property
    def rows(self) -> Any:
        """The positions of the queries: [rows, 1], or as the mask `positions`."""
        if "positions" in self.masks:
            return self.masks["positions"]
        first = self.start[0] + self.params["offset"]
        return (first + self.xp.arange(self.q.shape[-2]))[:, None]

    @cached_property
    def columns(self) -> Any:
        """The positions of the keys: [columns]."""
        return self.start[1] + self.xp.arange(self.k.shape[-2])

    def visible(self) -> list[Any]:
        """Returns masks; a score is visible if all are true."""
        xp, params, masks, visible = self.xp, self.params, self.masks, []
        causal, window = params["causal"], params["window"]
        if causal or window is not None:
            behind = xp.difference(self.rows, masks.get("memory_positions", self.columns))
            if causal:
                visible.append(behind >= 0)
            if window is not None:
                visible.append(xp.abs(behind) < window)
        if "segments" in masks:
            visible.append(masks["segments"] == masks["memory_segments"])
        visible += [masks[name] for name in ("mask", "present") if name in masks]
        if self.sizes.columns.size % self.k.shape[-2]:
            visible.append(self.columns < self.sizes.columns.size)  # the last block has pads
        return visible

    def scores(self) -> tuple[Any, Any]:
        """Returns the scores, -inf where hidden, and the derivative of the soft cap.

        The derivative is by the scaled products; None without a soft cap.
        """
        xp, cap = self.xp, self.params["soft_cap"]
        scores, slope = self.product("s", q=self.q, k=self.k) * self.params["scale"], None
        if cap is not None:
            squashed = xp.tanh(scores / cap)
            scores, slope = cap * squashed, 1 - squashed * squashed
        if "bias" in self.masks:
            scores = scores + xp.astype(self.masks["bias"], self.sum_dtype)
            scores = xp.where(scores <= HIDDEN, -math.inf, scores)
        if visible := self.visible():
            scores = xp.where(functools.reduce(operator.and_, visible), scores, -math.inf)
        return scores, slope

    def span(self, columns: int) -> tuple[Any, Any]:
        """Returns the range of blocks of columns, start and stop, that are visible to some row."""
        blocks = math.ceil(self.sizes.columns.size / columns)
        causal, window = self.params["causal"], self.params["window"]
        if not (causal or window is not None) or "memory_positions" in self.masks:
            return 0, blocks
        low, high = self.xp.min(self.rows), self.xp.max(self.rows)
        first = 0 if window is None else (low - window + 1) // columns
        last = high if causal else high + window - 1
        clip = self.xp.clip
        return clip(first, 0, blocks), clip(last // columns + 1, 0, blocks)


@dataclass(frozen=True)
class Parts:
    """The parts of a lead dim that blocks have, and what loops over them return.

    Attributes:
        axis: the axis of the dim.
        size: its size in a part.
        count: the number of parts.
        summed: for each result, whether it lacks the dim (size 1): it is the sum of those of parts.
        shapes: the shape of each result of a part.
    """

    axis: int
    size: int
    count: int
    summed: Sequence[bool]
    shapes: Sequence[Sequence[int]]

    @staticmethod
    def of(attention: Attention, shapes: Sequence[Sequence[int]]) -> Parts | None:
        """Returns the parts for results of some shapes; None: a block has all of the lead dims."""
        axis = attention.sizes.divided
        if axis is None:
            return None
        size = attention.sizes.lead_block[axis].size
        summed = [shape[axis] == 1 for shape in shapes]
        return Parts(
            axis,
            size,
            attention.q.shape[axis] // size,
            summed,
            [
                shape if is_sum else [*shape[:axis], size, *shape[axis + 1 :]]
                for shape, is_sum in zip(shapes, summed, strict=True)
            ],
        )


def pad_up(xp: OneDevice, array: Any, axis: int, multiple: int, fill: float = 0) -> Any:
    """Returns an array padded to a multiple along an axis, unless that has size 1."""
    size = array.shape[axis]
    if size == 1 or size % multiple == 0:
        return array
    widths = [(0, 0)] * len(array.shape)
    widths[axis] = (0, -size % multiple)
    return xp.pad(array, widths, fill)


def sum_to(xp: OneDevice, array: Any, sizes: Sequence[int]) -> Any:
    """Sums over the axes that have size 1 in `sizes`."""
    axes = tuple(i for i, size in enumerate(sizes) if size == 1 and array.shape[i] != 1)
    return xp.sum(array, axis=axes, keepdims=True) if axes else array


# The forward pass.


def accumulate(block: Attention, carry: Sequence[Any]) -> tuple[Any, Any, Any]:
    """Adds a block of columns to the running result, maximum and sum of its rows.

    The result is scaled by exp(-maximum), and not yet divided by the sum.
    """
    xp, (result, largest, total) = block.xp, carry
    scores, _ = block.scores()
    higher = xp.maximum(largest, xp.max(scores, axis=-1, keepdims=True))
    weights = xp.exp(scores - higher)
    correction = xp.exp(largest - higher)
    added = block.product("o", s=block.narrow(weights), v=block.v)
    result = result * correction + added
    return result, higher, total * correction + xp.sum(weights, axis=-1, keepdims=True)


def finish(xp: OneDevice, carry: Sequence[Any]) -> tuple[Any, Any]:
    """Returns the result of rows whose columns have all been added, and their log-sum-exp."""
    result, largest, total = carry
    empty = total == 0
    safe = xp.where(empty, 1, total)
    return result / safe, xp.where(empty, HIDDEN, largest + xp.log(safe))


# The backward pass.


def block_gradients(
    block: Attention, cotangent: Any, sums: Any, delta: Any
) -> tuple[Any, Any, Any, Any]:
    """Returns the gradients of a block of scores by q, k, v, and by its biased scores.

    Args:
        cotangent: that of the result.
        sums: the log-sum-exp of the rows.
        delta: the sums over value features of the result times its cotangent: [*lead, rows, 1].
    """
    scores, slope = block.scores()
    weights = block.xp.exp(scores - sums)
    grad_v = block.product("v", s=block.narrow(weights), o=cotangent)
    grad_scores = weights * (block.product("s", o=cotangent, v=block.v) - delta)
    grad_product = (grad_scores if slope is None else grad_scores * slope) * block.params["scale"]
    grad_product = block.narrow(grad_product)
    grad_q = block.product("q", s=grad_product, k=block.k)
    return grad_q, block.product("k", s=grad_product, q=block.q), grad_v, grad_scores


# Instructions.


def gradient_operands(
    xp: OneDevice, instruction: Instruction, inputs: Sequence[Any]
) -> tuple[Any, Any, Any]:
    """Returns the operands that only the gradient has.

    Returns:
        The result, its log-sum-exp, and its cotangent: [*lead, rows, value features or 1].
    """
    sizes, (out, of_sums, of_out) = AttentionSizes.of(instruction), instruction.inputs[-3:]
    rows = Shape([*sizes.lead, sizes.rows])
    wide = Shape([*rows, *sizes.values])
    flat = [*rows.sizes, sizes.values.volume]
    result = xp.reshape(align(xp, inputs[-3], out.local, wide), flat)
    cotangent = xp.reshape(align(xp, inputs[-1], of_out.local, wide), flat)
    sums = xp.reshape(align(xp, inputs[-2], of_sums.local, rows), [*rows.sizes, 1])
    return result, sums, cotangent


def results(attention: Attention, instruction: Instruction, result: Any, sums: Any) -> list[Any]:
    """Returns the result and its log-sum-exp with the dims of the instruction's results."""
    rows, (out, of_sums) = [*attention.sizes.lead, attention.sizes.rows], instruction.outputs
    dims = [*rows, *attention.sizes.values]
    return [
        _as_output(attention.xp, result, dims, out),
        _as_output(attention.xp, sums, rows, of_sums),
    ]


def gradients(attention: Attention, instruction: Instruction, computed: Sequence[Any]) -> list[Any]:
    """Returns the gradients by q, k, v and maybe the bias with the dims of the results."""
    sizes = attention.sizes
    rows, columns = [*sizes.lead, sizes.rows], [*sizes.lead, sizes.columns]
    dims: list[Iterable[Dimension]] = [[*rows, sizes.features], [*columns, sizes.features]]
    dims += [[*columns, *sizes.values], sizes.full]
    triples = zip(computed, dims, instruction.outputs, strict=False)
    return [_as_output(attention.xp, array, own, value) for array, own, value in triples]


def _as_output(xp: OneDevice, array: Any, dims: Iterable[Dimension], value: Value) -> Any:
    """Returns an array of dims `dims` with the dims of an output, which lacks some of size 1."""
    present = Shape(dim for dim in dims if value.local.find(dim.name))
    order = [present.position(name) for name in value.local.names]
    return xp.astype(permuted(xp, xp.reshape(array, present.sizes), order), value.dtype)
