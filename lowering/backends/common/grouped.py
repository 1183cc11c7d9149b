"""Grouped products as matrices: rows, the group of each row, and what is left of the dims.

The dims of `group` are the rows. An operand that lacks some of them has one row for several of the
product's. Dims that the groups' tensor shares with the rows pair up: each combination of their
positions has groups of its own. This is all that the frameworks share; numpy uses none of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from meshdsl.lowering.backends.common.arrange import align, equation
from meshdsl.lowering.backends.common.namespace import OneDevice
from meshdsl.lowering.parameters import AlongDim, parameters_of
from meshdsl.lowering.program import Instruction
from meshdsl.tensors.dims import Dimension, Shape

_ROW = Dimension("row_", 1)  # stands for any number of rows in equations
# The rows of a block: more are not multiplied faster. Each block of an outer product reads and
# writes the group's sum, which takes as long as the product of about 20 rows.
_LONGEST = {"grouped_einsum": 128, "grouped_outer": 256}
_BLOCKS = {"grouped_einsum": 4, "grouped_outer": 2}  # at least, for a group of average size


@dataclass(frozen=True)
class Grouping:
    """How an instruction's operands and result become tensors of rows and of groups.

    Attributes:
        rows: the dims of the rows; those of the first operand and of the result come first.
        pairs: the rows' dims that the groups' tensor has.
        count: the dim of the groups.
        tables: whether the second operand has the groups, rather than the result.
    """

    instruction: Instruction
    rows: Shape
    pairs: Shape
    count: Dimension
    tables: bool

    @staticmethod
    def of(instruction: Instruction) -> Grouping:
        """Returns the grouping of a `grouped_einsum` or a `grouped_outer`."""
        x, y, group = (value.local for value in instruction.inputs)
        (out,), dim = instruction.outputs, parameters_of(instruction, AlongDim)["dim"]
        tables = instruction.op == "grouped_einsum"
        owner, other = (y, out.local) if tables else (out.local, y)

        def lacking(name: str) -> int:
            return sum(shape.find(name) is None for shape in (x, other))

        rows = Shape(sorted(group, key=lambda dim: lacking(dim.name)))
        pairs = Shape(dim for dim in rows if owner.find(dim.name))
        return Grouping(instruction, rows, pairs, owner.get(dim), tables)

    @property
    def groups(self) -> int:
        """The number of groups, for all positions of the dims that pair up."""
        return self.pairs.volume * self.count.size

    @property
    def block(self) -> int:
        """How many rows of a group are multiplied at once, if they are multiplied in blocks."""
        op, each, block = self.instruction.op, self.rows.volume // self.groups, 8
        while block < _LONGEST[op] and 2 * block * _BLOCKS[op] <= each:
            block *= 2
        return block

    @cached_property
    def equation(self) -> str:
        """The equation of the product of some rows."""
        x, y = (value.local for value in self.instruction.inputs[:2])
        out = self.instruction.outputs[0].local
        left = Shape([_ROW, *self.rest(x)])
        if self.tables:
            return equation([left, self.rest(y)], Shape([_ROW, *self.rest(out)]))
        return equation([left, Shape([_ROW, *self.rest(y)])], self.rest(out))

    def matrix(self) -> tuple[Shape, Shape] | None:
        """Returns the dims of rows and of columns of a group's matrix.

        None: the product of a row with its group is no vector times a matrix.
        """
        x, y = (self.rest(value.local) for value in self.instruction.inputs[:2])
        out = self.rest(self.instruction.outputs[0].local)
        inner, columns = x, (y if self.tables else out).without(x.names)
        of_second, of_result = (
            ({*inner.names, *columns.names}, {*columns.names})
            if self.tables
            else ({*columns.names}, {*inner.names, *columns.names})
        )
        fits = of_second == {*y.names} and of_result == {*out.names}
        return (inner, columns) if fits else None

    def rest(self, shape: Shape) -> Shape:
        """Returns the dims of a tensor that are neither rows nor groups."""
        return shape.without([*self.rows.names, self.count.name])

    def own(self, shape: Shape) -> Shape:
        """Returns the dims of rows that a tensor has, in the order of the rows."""
        return Shape(dim for dim in self.rows if shape.find(dim.name))

    def as_rows(self, xp: OneDevice, array: Any, shape: Shape) -> Any:
        """Returns a tensor as [its rows, rest]."""
        rows, rest = self.own(shape), self.rest(shape)
        ordered = align(xp, array, shape, Shape([*rows, *rest]))
        return xp.reshape(ordered, (rows.volume, *rest.sizes))

    def as_tables(self, xp: OneDevice, array: Any, shape: Shape) -> Any:
        """Returns a tensor as [groups, rest]."""
        rest = self.rest(shape)
        ordered = align(xp, array, shape, Shape([*self.pairs, self.count, *rest]))
        return xp.reshape(ordered, (self.groups, *rest.sizes))

    def numbers(self, xp: OneDevice, array: Any, shape: Shape) -> Any:
        """Returns the group of each row, by its number among all; `groups` for rows of none."""
        flat = xp.reshape(align(xp, array, shape, self.rows), (self.rows.volume,))
        inside = (flat >= 0) & (flat < self.count.size)
        first = self.index(xp.arange(self.rows.volume), self.pairs)
        if first is not None:
            flat = flat + first * self.count.size
        return xp.where(inside, flat, self.groups)

    def index(self, row: Any, own: Shape) -> Any:
        """Returns the position that some rows have in a tensor with the rows `own`.

        None: it has a single row.
        """
        if own == self.rows:
            return row
        index, stride = None, own.volume
        inner = self.rows.volume
        for dim in self.rows:
            inner //= dim.size
            if own.find(dim.name) is None:
                continue
            stride //= dim.size
            part = (row // inner) % dim.size * stride
            index = part if index is None else index + part
        return index

    def restored(self, xp: OneDevice, array: Any) -> Any:
        """Returns the result [its rows or groups, rest] with its dims in order."""
        out = self.instruction.outputs[0].local
        front: Sequence[Dimension] = self.own(out) if self.tables else [*self.pairs, self.count]
        ordered = Shape([*front, *self.rest(out)])
        return align(xp, xp.reshape(array, ordered.sizes), ordered, out)
