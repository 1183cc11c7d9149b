"""Attention on one device, in blocks of scores.

`common.attention` says what is computed for a block. Blocks of which all scores are hidden, by
`causal` or a window, are skipped. If there are few scores, they are one block.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from meshdsl.lowering.backends.common.arrange import permuted
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
from meshdsl.lowering.backends.tf import namespace as xp
from meshdsl.lowering.backends.tf.machine import Arrays, Emitter, Machine
from meshdsl.lowering.program import Instruction


def _loop(start: Any, stop: Any, body: Callable[..., Sequence], carry: Sequence) -> list:
    """Returns the carry after a loop over numbers: carry = body(number, *carry)."""

    def step(number: tf.Tensor, *carry: Any) -> list:
        return [number + 1, *body(number, *carry)]

    first = tf.convert_to_tensor(start, tf.int32)
    _, *result = tf.while_loop(
        lambda number, *carry: number < stop, step, [first, *carry], parallel_iterations=1
    )
    return result


def _in_parts(
    attention: Attention,
    beside: Sequence[tf.Tensor],
    compute: Callable[..., Sequence[tf.Tensor]],
    shapes: Sequence[Sequence[int]],
) -> list[tf.Tensor]:
    """Returns what `compute` returns, called for one part of the batches and heads after the other.

    Args:
        beside: tensors that `compute` takes after the attention: [*lead, ...].
        shapes: those of the results (see `Parts`).
    """
    parts = Parts.of(attention, shapes)
    if parts is None:
        return list(compute(attention, *beside))
    axis, summed, dtype = parts.axis, parts.summed, attention.sum_dtype
    carry = [
        tf.zeros(shape, dtype)
        if is_sum
        else tf.TensorArray(dtype, parts.count, element_shape=shape)
        for shape, is_sum in zip(parts.shapes, summed, strict=True)
    ]

    def step(number: tf.Tensor, *carry: Any) -> list:
        start = number * parts.size
        slices = [xp.slice_axis(x, start, parts.size, axis) for x in beside]
        results = _in_parts(attention.part(axis, start), slices, compute, parts.shapes)
        rows = zip(carry, results, summed, strict=True)
        return [total + x if is_sum else total.write(number, x) for total, x, is_sum in rows]

    def joined(stack: tf.Tensor, shape: Sequence[int]) -> tf.Tensor:
        order = [*range(1, axis + 1), 0, *range(axis + 1, len(shape) + 1)]
        return tf.reshape(permuted(xp, stack, order), shape)

    rows = zip(_loop(0, parts.count, step, carry), shapes, summed, strict=True)
    return [x if is_sum else joined(x.stack(), shape) for x, shape, is_sum in rows]


class _Grid(NamedTuple):
    """The blocks of a tensor along its last two axes, which loops write one by one.

    Attributes:
        down, across: the numbers of blocks along these axes.
    """

    down: int
    across: int

    @staticmethod
    def of(x: tf.Tensor, block: tf.Tensor) -> _Grid:
        return _Grid(*(x.shape[axis] // block.shape[axis] for axis in (-2, -1)))

    def zeros(self, block: tf.Tensor, dtype: tf.DType) -> tf.TensorArray:
        """Returns the blocks of a tensor of zeros."""
        count, sizes = self.down * self.across, block.shape.as_list()
        empty = tf.TensorArray(dtype, count, element_shape=sizes, clear_after_read=False)
        return empty.unstack(tf.zeros([count, *sizes], dtype))

    def number(self, row: Any, column: Any) -> Any:
        """Returns the number of a block."""
        return (row if self.down > 1 else 0) * self.across + (column if self.across > 1 else 0)

    def joined(self, blocks: tf.TensorArray) -> tf.Tensor:
        """Returns the tensor of some blocks."""
        stacked = blocks.stack()
        *lead, rows, columns = stacked.shape.as_list()[1:]
        stacked = tf.reshape(stacked, [self.down, self.across, *lead, rows, columns])
        last = len(lead) + 2
        ordered = permuted(xp, stacked, [*range(2, last), 0, last, 1, last + 1])
        return tf.reshape(ordered, [*lead, self.down * rows, self.across * columns])


# The forward pass.


def _start(part: Attention) -> list[tf.Tensor]:
    """Returns the result, maximum and sum of rows before the first block of columns."""
    rows = part.q.shape[:-1]
    result = tf.zeros([*rows, part.v.shape[-1]], part.sum_dtype)
    largest = tf.fill([*rows, 1], tf.constant(HIDDEN, part.sum_dtype))
    return [result, largest, tf.zeros([*rows, 1], part.sum_dtype)]


def forward(attention: Attention) -> list[tf.Tensor]:
    """Returns the result and the log-sum-exp of its rows: [*lead, rows, value features or 1]."""
    lead = attention.q.shape[:-1]
    shapes = [[*lead, attention.v.shape[-1]], [*lead, 1]]
    return _in_parts(attention, [], _forward, shapes)


def _forward(attention: Attention) -> list[tf.Tensor]:
    rows, columns = attention.sizes.blocks
    if attention.sizes.at_once:
        return list(finish(xp, accumulate(attention, _start(attention))))
    padded = attention.padded(rows, columns)
    example = _start(padded.block(0, 0, rows, columns))

    def of_rows(i: tf.Tensor, *written: tf.TensorArray) -> list[tf.TensorArray]:
        row = i * rows

        def of_columns(j: tf.Tensor, *carry: tf.Tensor) -> Sequence[tf.Tensor]:
            return accumulate(padded.block(row, j * columns, rows, columns), carry)

        first = padded.block(row, 0, rows, columns)
        finished = finish(xp, _loop(*first.span(columns), of_columns, _start(first)))
        return [blocks.write(i, x) for blocks, x in zip(written, finished, strict=True)]

    grid = _Grid(padded.q.shape[-2] // rows, 1)
    empty = [
        grid.zeros(example[0], attention.sum_dtype),
        grid.zeros(example[1], attention.sum_dtype),
    ]
    results_in_blocks = _loop(0, grid.down, of_rows, empty)
    return [grid.joined(blocks)[..., : attention.q.shape[-2], :] for blocks in results_in_blocks]


# The backward pass.


def _gradients_of_block(
    block: Attention, cotangent: tf.Tensor, sums: tf.Tensor, delta: tf.Tensor
) -> list[tf.Tensor]:
    """Returns the gradients of a block by q, k, v, and with `bias_gradient` by the bias."""
    *grads, grad_scores = block_gradients(block, cotangent, sums, delta)
    shapes = [bias.shape.as_list() for bias in block.targets[3:]]
    return [*grads, *(sum_to(xp, grad_scores, shape) for shape in shapes)]


def backward(
    attention: Attention, result: tf.Tensor, sums: tf.Tensor, cotangent: tf.Tensor
) -> list[tf.Tensor]:
    """Returns the gradients by q, k, v, and with `bias_gradient` by the bias."""
    shapes = [x.shape.as_list() for x in attention.targets]
    return _in_parts(attention, [result, sums, cotangent], _backward, shapes)


def _backward(
    attention: Attention, result: tf.Tensor, sums: tf.Tensor, cotangent: tf.Tensor
) -> list[tf.Tensor]:
    rows, columns = attention.sizes.blocks
    cotangent = tf.cast(cotangent, attention.sum_dtype)
    delta = tf.reduce_sum(tf.cast(result, attention.sum_dtype) * cotangent, -1, keepdims=True)
    if attention.sizes.at_once:
        return _gradients_of_block(attention, cotangent, sums, delta)
    padded = attention.padded(rows, columns)
    # Padded rows have weights of 0.
    operands = [
        pad_up(xp, x, -2, rows, f) for x, f in ((cotangent, 0), (sums, -HIDDEN), (delta, 0))
    ]
    targets, examples = (x.targets for x in (padded, padded.block(0, 0, rows, columns)))
    grids = [_Grid.of(*pair) for pair in zip(targets, examples, strict=True)]
    empty = [grid.zeros(x, attention.sum_dtype) for grid, x in zip(grids, examples, strict=True)]

    def of_rows(i: tf.Tensor, blocks_q: tf.TensorArray, *totals: tf.TensorArray) -> list:
        row = i * rows
        of_block = [xp.slice_axis(x, row, rows, len(x.shape) - 2) for x in operands]

        def of_columns(j: tf.Tensor, grad_q: tf.Tensor, *totals: tf.TensorArray) -> list:
            more_q, *more = _gradients_of_block(
                padded.block(row, j * columns, rows, columns), *of_block
            )
            positions = [(j, 0), (j, 0), (i, j)]
            return [grad_q + more_q, *map(_added, grids[1:], totals, positions, more)]

        first = padded.block(row, 0, rows, columns)
        zero = tf.zeros(first.q.shape, attention.sum_dtype)
        grad_q, *more = _loop(*first.span(columns), of_columns, [zero, *totals])
        return [blocks_q.write(i, grad_q), *more]

    grads = _loop(0, grids[0].down, of_rows, empty)
    return [
        grid.joined(blocks)[(..., *map(slice, like.shape[-2:]))]
        for grid, blocks, like in zip(grids, grads, attention.targets, strict=True)
    ]


def _added(
    grid: _Grid, blocks: tf.TensorArray, position: tuple[Any, Any], more: tf.Tensor
) -> tf.TensorArray:
    """Returns blocks with numbers added to the block at a (row, column)."""
    number = grid.number(*position)
    return blocks.write(number, blocks.read(number) + more)


# Instructions.


def _if_active(
    attention: Attention,
    compute: Callable[[], Sequence[tf.Tensor]],
    shapes: Sequence[Sequence[int]],
    fills: Sequence[float],
) -> Sequence[tf.Tensor]:
    """Returns the tensors of `compute`, or tensors of `fills` if all scores are hidden."""
    if attention.active is None:
        return compute()

    def skip() -> list[tf.Tensor]:
        return [
            tf.fill(s, tf.constant(x, attention.sum_dtype))
            for s, x in zip(shapes, fills, strict=True)
        ]

    return tf.cond(attention.active, lambda: list(compute()), skip)


def _attention(machine: Machine, instruction: Instruction, inputs: Arrays) -> list[tf.Tensor]:
    attention = Attention.of(xp, instruction, inputs)
    lead = attention.q.shape[:-1]
    shapes = [[*lead, attention.v.shape[-1]], [*lead, 1]]
    result, sums = _if_active(attention, lambda: forward(attention), shapes, (0, HIDDEN))
    return results(attention, instruction, result, sums)


def _gradient(machine: Machine, instruction: Instruction, inputs: Arrays) -> list[tf.Tensor]:
    attention = Attention.of(xp, instruction, inputs)
    result, sums, cotangent = gradient_operands(xp, instruction, inputs)
    shapes = [target.shape.as_list() for target in attention.targets]
    grads = _if_active(
        attention, lambda: backward(attention, result, sums, cotangent), shapes, (0,) * len(shapes)
    )
    return gradients(attention, instruction, grads)


EMITTERS: Mapping[str, Emitter] = {
    "attention": _attention,
    "attention_gradient": _gradient,
}
