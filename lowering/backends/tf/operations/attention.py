"""Attention on one device, in blocks of scores.

The blocks are those of Dao et al. (2022), "FlashAttention": forwards, each block of rows goes once
through the memory and keeps a running maximum and sum; backwards, the scores are made again from
the saved log-sum-exp. Blocks that are wholly hidden by `causal` or a window are not visited. Few
scores are one block.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from meshdsl.lowering.backends.common.arrange import permuted
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
from meshdsl.lowering.backends.tf import namespace as xp
from meshdsl.lowering.backends.tf.machine import Arrays, Emitter, Machine
from meshdsl.lowering.program import Instruction


def _loop(start: Any, stop: Any, body: Callable[..., Sequence], carry: Sequence) -> list:
    """Returns what a body, given a number and what it returned before, makes of all numbers."""

    def following(number: tf.Tensor, *carry: Any) -> list:
        return [number + 1, *body(number, *carry)]

    first = tf.convert_to_tensor(start, tf.int32)
    _, *found = tf.while_loop(
        lambda number, *carry: number < stop, following, [first, *carry], parallel_iterations=1
    )
    return found


class _Grid(NamedTuple):
    """A tensor in blocks of its last two axes, which loops write one at a time.

    Attributes:
        down, across: how many there are along each of the axes.
    """

    down: int
    across: int

    @staticmethod
    def of(whole: tf.Tensor, block: tf.Tensor) -> _Grid:
        return _Grid(*(whole.shape[axis] // block.shape[axis] for axis in (-2, -1)))

    def zeros(self, block: tf.Tensor, dtype: tf.DType) -> tf.TensorArray:
        """Returns the blocks of a tensor of zeros."""
        count, sizes = self.down * self.across, block.shape.as_list()
        empty = tf.TensorArray(dtype, count, element_shape=sizes, clear_after_read=False)
        return empty.unstack(tf.zeros([count, *sizes], dtype))

    def number(self, row: Any, column: Any) -> Any:
        """Returns the number of a block."""
        return (row if self.down > 1 else 0) * self.across + (column if self.across > 1 else 0)

    def joined(self, blocks: tf.TensorArray) -> tf.Tensor:
        """Returns the tensor that the blocks are of."""
        stacked = blocks.stack()
        *lead, rows, columns = stacked.shape.as_list()[1:]
        stacked = tf.reshape(stacked, [self.down, self.across, *lead, rows, columns])
        last = len(lead) + 2
        laid = permuted(xp, stacked, [*range(2, last), 0, last, 1, last + 1])
        return tf.reshape(laid, [*lead, self.down * rows, self.across * columns])


# Forwards.


def _start(piece: Attention) -> list[tf.Tensor]:
    rows = piece.q.shape[:-1]
    mixed = tf.zeros([*rows, piece.v.shape[-1]], piece.sum_dtype)
    largest = tf.fill([*rows, 1], tf.constant(HIDDEN, piece.sum_dtype))
    return [mixed, largest, tf.zeros([*rows, 1], piece.sum_dtype)]


def forward(attention: Attention) -> list[tf.Tensor]:
    """Returns the result and the log-sum-exp of its rows: [*lead, rows, value features or 1]."""
    rows, columns = attention.sizes.blocks
    if attention.sizes.at_once:
        return list(finish(xp, accumulate(attention, _start(attention))))
    whole = attention.padded(rows, columns)
    example = _start(whole.block(0, 0, rows, columns))

    def of_rows(i: tf.Tensor, *wholes: tf.TensorArray) -> list[tf.TensorArray]:
        row = i * rows

        def of_columns(j: tf.Tensor, *carry: tf.Tensor) -> Sequence[tf.Tensor]:
            return accumulate(whole.block(row, j * columns, rows, columns), carry)

        first = whole.block(row, 0, rows, columns)
        found = finish(xp, _loop(*first.span(columns), of_columns, _start(first)))
        return [blocks.write(i, x) for blocks, x in zip(wholes, found, strict=True)]

    grid = _Grid(whole.q.shape[-2] // rows, 1)
    empty = [
        grid.zeros(example[0], attention.sum_dtype),
        grid.zeros(example[1], attention.sum_dtype),
    ]
    found = _loop(0, grid.down, of_rows, empty)
    return [grid.joined(blocks)[..., : attention.q.shape[-2], :] for blocks in found]


# Backwards.


def _pull(
    piece: Attention, cotangent: tf.Tensor, sums: tf.Tensor, delta: tf.Tensor
) -> list[tf.Tensor]:
    """Returns a block's share of the gradients by q, k, v, and with `bias_gradient`, the bias."""
    *found, grad_scores = block_gradients(piece, cotangent, sums, delta)
    shapes = [bias.shape.as_list() for bias in piece.targets[3:]]
    return [*found, *(sum_to(xp, grad_scores, shape) for shape in shapes)]


def backward(
    attention: Attention, mixed: tf.Tensor, sums: tf.Tensor, cotangent: tf.Tensor
) -> list[tf.Tensor]:
    """Returns the gradients by q, k, v, and with `bias_gradient`, by the bias."""
    rows, columns = attention.sizes.blocks
    cotangent = tf.cast(cotangent, attention.sum_dtype)
    delta = tf.reduce_sum(tf.cast(mixed, attention.sum_dtype) * cotangent, -1, keepdims=True)
    if attention.sizes.at_once:
        return _pull(attention, cotangent, sums, delta)
    whole = attention.padded(rows, columns)
    # Rows that are pads have weights of 0.
    ends = [pad_up(xp, x, -2, rows, f) for x, f in ((cotangent, 0), (sums, -HIDDEN), (delta, 0))]
    targets, examples = (x.targets for x in (whole, whole.block(0, 0, rows, columns)))
    grids = [_Grid.of(*pair) for pair in zip(targets, examples, strict=True)]
    empty = [grid.zeros(x, attention.sum_dtype) for grid, x in zip(grids, examples, strict=True)]

    def of_rows(i: tf.Tensor, of_q: tf.TensorArray, *sums_of: tf.TensorArray) -> list:
        row = i * rows
        own = [xp.slice_axis(x, row, rows, len(x.shape) - 2) for x in ends]

        def of_columns(j: tf.Tensor, grad_q: tf.Tensor, *sums_of: tf.TensorArray) -> list:
            more_q, *more = _pull(whole.block(row, j * columns, rows, columns), *own)
            places = [(j, 0), (j, 0), (i, j)]
            return [grad_q + more_q, *map(_added, grids[1:], sums_of, places, more)]

        first = whole.block(row, 0, rows, columns)
        nothing = tf.zeros(first.q.shape, attention.sum_dtype)
        grad_q, *more = _loop(*first.span(columns), of_columns, [nothing, *sums_of])
        return [of_q.write(i, grad_q), *more]

    found = _loop(0, grids[0].down, of_rows, empty)
    return [
        grid.joined(blocks)[(..., *map(slice, like.shape[-2:]))]
        for grid, blocks, like in zip(grids, found, attention.targets, strict=True)
    ]


def _added(
    grid: _Grid, blocks: tf.TensorArray, place: tuple[Any, Any], more: tf.Tensor
) -> tf.TensorArray:
    number = grid.number(*place)
    return blocks.write(number, blocks.read(number) + more)


# Instructions.


def _if_active(
    attention: Attention,
    compute: Callable[[], Sequence[tf.Tensor]],
    shapes: Sequence[Sequence[int]],
    hidden: Sequence[float],
) -> Sequence[tf.Tensor]:
    """Returns what `compute` does, or what it would find if nothing is seen."""
    if attention.active is None:
        return compute()

    def skip() -> list[tf.Tensor]:
        return [
            tf.fill(s, tf.constant(x, attention.sum_dtype))
            for s, x in zip(shapes, hidden, strict=True)
        ]

    return tf.cond(attention.active, lambda: list(compute()), skip)


def _attention(machine: Machine, instruction: Instruction, inputs: Arrays) -> list[tf.Tensor]:
    attention = Attention.of(xp, instruction, inputs)
    at = attention.q.shape[:-1]
    shapes = [[*at, attention.v.shape[-1]], [*at, 1]]
    mixed, sums = _if_active(attention, lambda: forward(attention), shapes, (0, HIDDEN))
    return results(attention, instruction, mixed, sums)


def _gradient(machine: Machine, instruction: Instruction, inputs: Arrays) -> list[tf.Tensor]:
    attention = Attention.of(xp, instruction, inputs)
    mixed, sums, cotangent = gradient_operands(xp, instruction, inputs)
    shapes = [target.shape.as_list() for target in attention.targets]
    found = _if_active(
        attention, lambda: backward(attention, mixed, sums, cotangent), shapes, (0,) * len(shapes)
    )
    return gradients(attention, instruction, found)


EMITTERS: Mapping[str, Emitter] = {
    "attention": _attention,
    "attention_gradient": _gradient,
}
