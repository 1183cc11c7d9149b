"""Grouped products in blocks: each block has rows of one group.

A loop runs over the blocks that have rows. Its count is known only when it runs: groups may have
any number of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf

from meshdsl.lowering.backends.common.grouped import Grouping
from meshdsl.lowering.backends.tf import namespace as xp
from meshdsl.lowering.backends.tf.machine import Arrays, Emitter, Machine
from meshdsl.lowering.backends.tf.operations.elementwise import widened
from meshdsl.lowering.program import Instruction, Value
from meshdsl.tensors.dims import Shape


class _Blocks:
    """The rows in the order of their groups, cut into blocks.

    Attributes:
        count: how many blocks have rows, an s32 scalar.
    """

    def __init__(self, grouping: Grouping, inputs: Arrays) -> None:
        self.grouping = grouping
        self.size = grouping.block
        shape = grouping.instruction.inputs[2].local
        numbers = grouping.numbers(xp, inputs[2], shape)
        order = tf.argsort(numbers, stable=True)
        self._order = tf.pad(order, [[0, self.size]])
        # No bincount, and no indexing by a tensor: these have no form for TPUs.
        of_group = numbers[:, None] == tf.range(grouping.groups, dtype=numbers.dtype)
        sizes = tf.reduce_sum(tf.cast(of_group, tf.int32), 0)
        self._stops = tf.cumsum(sizes)
        self._first = self._stops - sizes
        blocks = (sizes + self.size - 1) // self.size
        self._last_blocks = tf.cumsum(blocks)
        self._first_blocks = self._last_blocks - blocks
        self.count = self._last_blocks[-1]

    def group(self, number: tf.Tensor) -> tf.Tensor:
        """Returns the group of a block."""
        return tf.reduce_sum(tf.cast(self._last_blocks <= number, tf.int32))

    def rows(self, number: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns the rows of a block, and which of them are of its group."""
        group = self.group(number)
        before = number - tf.gather(self._first_blocks, group)
        start = tf.gather(self._first, group) + before * self.size
        rows = tf.slice(self._order, [start], [self.size])
        return rows, start + tf.range(self.size) < tf.gather(self._stops, group)

    def place(self, row: tf.Tensor, inside: tf.Tensor, own: Shape) -> tf.Tensor:
        """Returns the positions of rows in a tensor; one past its end for rows outside."""
        index = self.grouping.index(row, own)
        return tf.where(inside, 0 if index is None else index, own.volume)


def _factor(array: tf.Tensor, value: Value) -> tf.Tensor:
    """Returns an operand in a dtype that TensorFlow multiplies."""
    return widened(xp.numbers(array, value.dtype))


def _rows_of(blocks: _Blocks, array: tf.Tensor, value: Value) -> Callable[..., tf.Tensor]:
    """Returns the function that looks up an operand's rows; zeros for rows outside."""
    grouping, shape = blocks.grouping, value.local
    rows = grouping.as_rows(xp, _factor(array, value), shape)
    rows = tf.concat([rows, tf.zeros_like(rows[:1])], 0)
    own = grouping.own(shape)
    return lambda row, inside: tf.gather(rows, blocks.place(row, inside, own))


def _loop(blocks: _Blocks, step: Callable[..., tf.Tensor], blank: tf.Tensor) -> tf.Tensor:
    """Returns the result after all blocks; `step` adds one block to it."""
    _, result = tf.while_loop(
        lambda number, _: number < blocks.count,
        lambda number, result: [number + 1, step(number, result)],
        [tf.constant(0, tf.int32), blank],
        parallel_iterations=1,
    )
    return result


def _looked_up(machine: Machine, instruction: Instruction, inputs: Arrays) -> Any:
    """Returns the products of rows with the matrices of their groups."""
    grouping = Grouping.of(instruction)
    (x, w, _), (out,) = instruction.inputs, instruction.outputs
    blocks = _Blocks(grouping, inputs)
    rows = _rows_of(blocks, inputs[0], x)
    tables = grouping.as_tables(xp, _factor(inputs[1], w), w.local)
    own = grouping.own(out.local)

    def step(number: tf.Tensor, result: tf.Tensor) -> tf.Tensor:
        row, inside = blocks.rows(number)
        table = tf.gather(tables, blocks.group(number))
        product = tf.einsum(grouping.equation, rows(row, inside), table)
        place = blocks.place(row, inside, own)
        return tf.tensor_scatter_nd_add(result, place[:, None], product)

    blank = tf.zeros([own.volume + 1, *grouping.rest(out.local).sizes], tables.dtype)
    result = _loop(blocks, step, blank)[:-1]
    return grouping.restored(xp, tf.cast(result, out.dtype))


def _summed(machine: Machine, instruction: Instruction, inputs: Arrays) -> Any:
    """Returns for each group the sum of the products of its rows."""
    grouping = Grouping.of(instruction)
    (x, y, _), (out,) = instruction.inputs, instruction.outputs
    blocks = _Blocks(grouping, inputs)
    left, right = _rows_of(blocks, inputs[0], x), _rows_of(blocks, inputs[1], y)

    def step(number: tf.Tensor, result: tf.Tensor) -> tf.Tensor:
        row, inside = blocks.rows(number)
        product = tf.einsum(grouping.equation, left(row, inside), right(row, inside))
        group = tf.reshape(blocks.group(number), [1, 1])
        return tf.tensor_scatter_nd_add(result, group, product[None])

    blank = tf.zeros(
        [grouping.groups, *grouping.rest(out.local).sizes], _factor(inputs[0], x).dtype
    )
    return grouping.restored(xp, tf.cast(_loop(blocks, step, blank), out.dtype))


EMITTERS: Mapping[str, Emitter] = {"grouped_einsum": _looked_up, "grouped_outer": _summed}
