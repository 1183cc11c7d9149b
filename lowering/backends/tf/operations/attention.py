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

from meshdsl.lowering.backends.common.arrange import lay
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
        laid = lay(xp, stacked, [*range(2, last), 0, last, 1, last + 1])
        return tf.reshape(laid, [*lead, self.down * rows, self.across * columns])


# Forwards.


def _start(piece: Attention) -> list[tf.Tensor]:
    rows = piece.q.shape[:-1]
    mixed = tf.zeros([*rows, piece.v.shape[-1]], piece.work)
    largest = tf.fill([*rows, 1], tf.constant(HIDDEN, piece.work))
    return [mixed, largest, tf.zeros([*rows, 1], piece.work)]


def forward(this: Attention) -> list[tf.Tensor]:
    """Returns the result and the log-sum-exp of its rows: [*lead, rows, value features or 1]."""
    rows, columns = this.sizes.blocks
    if this.sizes.at_once:
        return list(finish(xp, accumulate(this, _start(this))))
    whole = this.padded(rows, columns)
    example = _start(whole.block(0, 0, rows, columns))

    def of_rows(i: tf.Tensor, *wholes: tf.TensorArray) -> list[tf.TensorArray]:
        row = i * rows

        def of_columns(j: tf.Tensor, *carry: tf.Tensor) -> Sequence[tf.Tensor]:
            return accumulate(whole.block(row, j * columns, rows, columns), carry)

        first = whole.block(row, 0, rows, columns)
        found = finish(xp, _loop(*first.span(columns), of_columns, _start(first)))
        return [blocks.write(i, x) for blocks, x in zip(wholes, found, strict=True)]

    grid = _Grid(whole.q.shape[-2] // rows, 1)
    empty = [grid.zeros(example[0], this.work), grid.zeros(example[1], this.work)]
    found = _loop(0, grid.down, of_rows, empty)
    return [grid.joined(blocks)[..., : this.q.shape[-2], :] for blocks in found]


# Backwards.


def _pull(
    piece: Attention, arriving: tf.Tensor, sums: tf.Tensor, delta: tf.Tensor
) -> list[tf.Tensor]:
    """Returns a block's share of the gradients by q, k, v, and with `bias_gradient`, the bias."""
    *found, to_scores = pull(piece, arriving, sums, delta)
    shapes = [bias.shape.as_list() for bias in piece.targets[3:]]
    return [*found, *(sum_to(xp, to_scores, shape) for shape in shapes)]


def backward(
    this: Attention, mixed: tf.Tensor, sums: tf.Tensor, arriving: tf.Tensor
) -> list[tf.Tensor]:
    """Returns the gradients by q, k, v, and with `bias_gradient`, by the bias."""
    rows, columns = this.sizes.blocks
    arriving = tf.cast(arriving, this.work)
    delta = tf.reduce_sum(tf.cast(mixed, this.work) * arriving, -1, keepdims=True)
    if this.sizes.at_once:
        return _pull(this, arriving, sums, delta)
    whole = this.padded(rows, columns)
    # Rows that are pads have weights of 0.
    ends = [pad_up(xp, x, -2, rows, f) for x, f in ((arriving, 0), (sums, -HIDDEN), (delta, 0))]
    targets, examples = (x.targets for x in (whole, whole.block(0, 0, rows, columns)))
    grids = [_Grid.of(*pair) for pair in zip(targets, examples, strict=True)]
    empty = [grid.zeros(x, this.work) for grid, x in zip(grids, examples, strict=True)]

    def of_rows(i: tf.Tensor, of_q: tf.TensorArray, *sums_of: tf.TensorArray) -> list:
        row = i * rows
        own = [xp.slice_axis(x, row, rows, len(x.shape) - 2) for x in ends]

        def of_columns(j: tf.Tensor, to_q: tf.Tensor, *sums_of: tf.TensorArray) -> list:
            more_q, *more = _pull(whole.block(row, j * columns, rows, columns), *own)
            places = [(j, 0), (j, 0), (i, j)]
            return [to_q + more_q, *map(_added, grids[1:], sums_of, places, more)]

        first = whole.block(row, 0, rows, columns)
        nothing = tf.zeros(first.q.shape, this.work)
        to_q, *more = _loop(*first.span(columns), of_columns, [nothing, *sums_of])
        return [of_q.write(i, to_q), *more]

    found = _loop(0, grids[0].down, of_rows, empty)
    return [
        grid.joined(blocks)[(..., *map(slice, like.shape[-2:]))]
        for grid, blocks, like in zip(grids, found, this.targets, strict=True)
    ]


def _added(
    grid: _Grid, blocks: tf.TensorArray, place: tuple[Any, Any], more: tf.Tensor
) -> tf.TensorArray:
    number = grid.number(*place)
    return blocks.write(number, blocks.read(number) + more)


# Instructions.


def _if_active(
    this: Attention,
    compute: Callable[[], Sequence[tf.Tensor]],
    shapes: Sequence[Sequence[int]],
    hidden: Sequence[float],
) -> Sequence[tf.Tensor]:
    """Returns what `compute` does, or what it would find if nothing is seen."""
    if this.active is None:
        return compute()

    def skip() -> list[tf.Tensor]:
        return [tf.fill(s, tf.constant(x, this.work)) for s, x in zip(shapes, hidden, strict=True)]

    return tf.cond(this.active, lambda: list(compute()), skip)


def _attention(machine: Machine, instruction: Instruction, inputs: Arrays) -> list[tf.Tensor]:
    this = Attention.of(xp, instruction, inputs)
    at = this.q.shape[:-1]
    shapes = [[*at, this.v.shape[-1]], [*at, 1]]
    mixed, sums = _if_active(this, lambda: forward(this), shapes, (0, HIDDEN))
    return results(this, instruction, mixed, sums)


def _gradient(machine: Machine, instruction: Instruction, inputs: Arrays) -> list[tf.Tensor]:
    this = Attention.of(xp, instruction, inputs)
    mixed, sums, arriving = arrived(xp, instruction, inputs)
    shapes = [target.shape.as_list() for target in this.targets]
    found = _if_active(
        this, lambda: backward(this, mixed, sums, arriving), shapes, (0,) * len(shapes)
    )
    return gradients(this, instruction, found)


EMITTERS: Mapping[str, Emitter] = {
    "attention": _attention,
    "attention_gradient": _gradient,
}
