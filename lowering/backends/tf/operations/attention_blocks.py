"""One attention's operands laid out, and blocks of its scores.

TensorFlow has no product that adds up in a wider dtype than that of its factors, so half precision
is widened, block by block.
"""

from __future__ import annotations

import functools
import math
import operator
import string
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import tensorflow as tf

from meshdsl.lowering.attention_sizes import AttentionSizes
from meshdsl.lowering.backends.common.arrange import align
from meshdsl.lowering.backends.tf import namespace as xp
from meshdsl.lowering.backends.tf.machine import Arrays
from meshdsl.lowering.program import Instruction, Value
from meshdsl.tensors.dims import Dimension, Shape

HIDDEN = -1e30  # a score that counts as hidden, and the log-sum-exp of none


@dataclass(frozen=True, eq=False)
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
    q: tf.Tensor
    k: tf.Tensor
    v: tf.Tensor
    masks: Mapping[str, tf.Tensor]
    active: tf.Tensor | None = None
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

        def laid(which: int, dims: Iterable[Dimension]) -> tf.Tensor:
            return lay_as(inputs[which], instruction.inputs[which], dims)

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
            v=tf.reshape(v, [*v.shape[: len(of_v) + 1], sizes.values.volume]),
            masks=masks,
            active=None if active is None else tf.reshape(active, []),
        )

    @property
    def work(self) -> tf.DType:
        """The dtype of scores and sums."""
        return tf.float64 if self.q.dtype == tf.float64 else tf.float32

    @property
    def with_bias(self) -> bool:
        """Whether the gradient by the bias is asked for."""
        return self.params["bias_gradient"]

    def product(self, out: str, **factors: tf.Tensor) -> tf.Tensor:
        """Returns a product of tensors named by their dims, accumulated in `work`."""
        words = ",".join(self.words[name] for name in factors)
        wide = (tf.cast(factor, self.work) for factor in factors.values())
        return tf.einsum(f"{words}->{self.words[out]}", *wide)

    def block(self, row: Any, column: Any, rows: int, columns: int) -> Attention:
        """Returns the part with some rows and columns of the scores."""

        def cut(x: tf.Tensor, by_row: bool, axis: int) -> tf.Tensor:
            start, size = (row, rows) if by_row else (column, columns)
            return x if x.shape[axis] == 1 else xp.slice_axis(x, start, size, len(x.shape) + axis)

        return replace(
            self,
            q=cut(self.q, True, -2),
            k=cut(self.k, False, -2),
            v=cut(self.v, False, -2),
            masks={n: cut(cut(mask, True, -2), False, -1) for n, mask in self.masks.items()},
            start=(row, column),
        )

    def whole_blocks(self, rows: int, columns: int) -> Attention:
        """Returns this with rows and columns up to multiples of a block."""
        masks = {n: pad(pad(mask, -2, rows), -1, columns) for n, mask in self.masks.items()}
        k, v = (pad(x, -2, columns) for x in (self.k, self.v))
        return replace(self, q=pad(self.q, -2, rows), k=k, v=v, masks=masks)

    @cached_property
    def rows(self) -> tf.Tensor:
        """The positions of the queries."""
        if "positions" in self.masks:
            return self.masks["positions"]
        first = self.start[0] + self.params["offset"]
        return (first + tf.range(self.q.shape[-2], dtype=tf.int32))[:, None]

    @cached_property
    def columns(self) -> tf.Tensor:
        return self.start[1] + tf.range(self.k.shape[-2], dtype=tf.int32)

    def visible(self) -> list[tf.Tensor]:
        """Returns the masks, all of which must be true."""
        params, masks, found = self.params, self.masks, []
        causal, window = params["causal"], params["window"]
        if causal or window is not None:
            behind = _apart(self.rows, masks.get("memory_positions", self.columns))
            if causal:
                found.append(behind >= 0)
            if window is not None:
                found.append(tf.abs(behind) < window)
        if "segments" in masks:
            found.append(tf.equal(masks["segments"], masks["memory_segments"]))
        found += [masks[name] for name in ("mask", "present") if name in masks]
        if self.sizes.columns.size % self.k.shape[-2]:
            found.append(self.columns < self.sizes.columns.size)  # the last block has pads
        return found

    def scores(self) -> tuple[tf.Tensor, tf.Tensor | None]:
        """Returns the scores, -inf where hidden, and their slope by the scaled products."""
        hidden = tf.constant(-math.inf, self.work)
        scores, slope = self.product("s", q=self.q, k=self.k) * self.params["scale"], None
        cap = self.params["soft_cap"]
        if cap is not None:
            bent = tf.tanh(scores / cap)
            scores, slope = cap * bent, 1 - bent * bent
        if "bias" in self.masks:
            scores = scores + tf.cast(self.masks["bias"], self.work)
            scores = tf.where(scores <= HIDDEN, hidden, scores)
        if seen := self.visible():
            scores = tf.where(functools.reduce(operator.and_, seen), scores, hidden)
        return scores, slope

    def span(self, columns: int) -> tuple[Any, Any]:
        """Returns the first block of columns that some row sees, and the one after the last."""
        blocks = math.ceil(self.sizes.columns.size / columns)
        causal, window = self.params["causal"], self.params["window"]
        if not (causal or window is not None) or "memory_positions" in self.masks:
            return 0, blocks
        low, high = (tf.cast(f(self.rows), tf.int32) for f in (tf.reduce_min, tf.reduce_max))
        first = 0 if window is None else (low - window + 1) // columns
        last = high if causal else high + window - 1
        limited = functools.partial(tf.clip_by_value, clip_value_min=0, clip_value_max=blocks)
        return limited(first), limited(last // columns + 1)


def _apart(rows: tf.Tensor, columns: tf.Tensor) -> tf.Tensor:
    """Returns by how much positions of queries are past those of the memory."""
    if rows.dtype != columns.dtype:
        rows, columns = (tf.cast(x, tf.int64) for x in (rows, columns))
    return rows - columns


def lay_as(array: tf.Tensor, value: Value, dims: Iterable[Dimension]) -> tf.Tensor:
    """Returns the tensor of a value with other dims, of size 1 where it has none."""
    return align(xp, array, value.local, Shape(dims))


def pad(array: tf.Tensor, axis: int, multiple: int, fill: float = 0) -> tf.Tensor:
    """Returns a tensor with fills up to a multiple along an axis of more than one element."""
    size = array.shape[axis]
    if size == 1 or size % multiple == 0:
        return array
    filled = tf.cast(fill, array.dtype)
    return xp.pad_axis(array, len(array.shape) + axis, 0, -size % multiple, filled)
