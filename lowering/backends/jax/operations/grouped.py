"""Grouped products: `jax.lax.ragged_dot` on accelerators, blocks of rows of one group on the CPU.

XLA multiplies all rows with the matrices of all groups where it has no kernel: on the CPU that
takes as many times longer as there are groups. Blocks take the time of the product of all rows.
A loop over the groups has inside a loop over the blocks of a group. The inner loop runs as often as
the group has blocks: rows of no group cost nothing. Each block gathers its rows, and puts their
products where they belong, so that no sorted copy of an operand is in memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from meshdsl.lowering.backends.common.arrange import align
from meshdsl.lowering.backends.common.grouped import Grouping
from meshdsl.lowering.backends.jax import namespace as xp
from meshdsl.lowering.backends.jax.machine import Arrays, Emitter, Machine
from meshdsl.lowering.program import Instruction
from meshdsl.tensors.dims import Dimension, Shape
from meshdsl.tensors.dtypes import accumulator, is_float


def _order(grouping: Grouping, inputs: Arrays) -> tuple[Any, Any]:
    """Returns the rows in the order of their groups, and where each group's rows begin and end."""
    instruction = grouping.instruction
    numbers = grouping.numbers(xp, jnp.asarray(inputs[2]), instruction.inputs[2].local)
    rows = lax.iota(np.int32, grouping.rows.volume)
    numbers, order = lax.sort((numbers.astype(np.int32), rows), num_keys=1, is_stable=True)
    bounds = jnp.searchsorted(numbers, lax.iota(np.int32, grouping.groups + 1))
    return order, bounds.astype(np.int32)


def _looked_up(machine: Machine, instruction: Instruction, inputs: Arrays) -> Any:
    """Returns the products of rows with the matrices of their groups."""
    grouping = Grouping.of(instruction)
    (x, w, _), (out,) = (v.local for v in instruction.inputs), instruction.outputs
    rows = grouping.as_rows(xp, jnp.asarray(inputs[0]), x)
    tables = grouping.as_tables(xp, jnp.asarray(inputs[1]), w)
    order, bounds = _order(grouping, inputs)
    multiply = _ragged_rows if _has_kernel(machine, grouping) else _blocks_of_rows
    result = multiply(grouping, rows, tables, order, bounds)
    return grouping.restored(xp, result.astype(out.dtype))


def _summed(machine: Machine, instruction: Instruction, inputs: Arrays) -> Any:
    """Returns for each group the sum of the products of its rows."""
    grouping = Grouping.of(instruction)
    (x, y, _), (out,) = (v.local for v in instruction.inputs), instruction.outputs
    left = grouping.as_rows(xp, jnp.asarray(inputs[0]), x)
    right = grouping.as_rows(xp, jnp.asarray(inputs[1]), y)
    order, bounds = _order(grouping, inputs)
    add_up = _ragged_sums if _has_kernel(machine, grouping) else _sums_of_blocks
    result = add_up(grouping, left, right, order, bounds)
    return grouping.restored(xp, result.astype(out.dtype))


def _has_kernel(machine: Machine, grouping: Grouping) -> bool:
    """Whether `ragged_dot` multiplies each row with its own group's matrix only."""
    dtype = grouping.instruction.outputs[0].dtype
    narrow = is_float(dtype) and dtype.itemsize <= 4
    return machine.platform != "cpu" and narrow and grouping.matrix() is not None


def _ragged_rows(grouping: Grouping, rows: Any, tables: Any, order: Any, bounds: Any) -> Any:
    """Sorts rows by group, multiplies, and puts the products in their places."""
    x, w, _ = (value.local for value in grouping.instruction.inputs)
    out = grouping.instruction.outputs[0]
    matrix = grouping.matrix()
    assert matrix is not None
    inner, columns = matrix
    groups = grouping.groups
    tables = align(xp, tables, _led(groups, grouping.rest(w)), _led(groups, [*inner, *columns]))
    tables = tables.reshape(groups, inner.volume, columns.volume)
    products = lax.ragged_dot(
        _sorted(grouping, rows, x, order, bounds),
        _of_kernel(tables),
        bounds[1:] - bounds[:-1],
        preferred_element_type=accumulator(out.dtype),
    )
    total = grouping.rows.volume
    inside = lax.iota(np.int32, total) < bounds[-1]
    products = jnp.where(inside[:, None], products, 0)
    _, places = lax.sort((order, lax.iota(np.int32, total)), num_keys=1)
    products = jnp.take(products, places, axis=0)
    own = grouping.own(out.local)
    summed = tuple(i for i, dim in enumerate(grouping.rows) if own.find(dim.name) is None)
    products = products.reshape(*grouping.rows.sizes, columns.volume).sum(summed)
    products = products.reshape(own.volume, *columns.sizes)
    rest = grouping.rest(out.local)
    return align(xp, products, _led(own.volume, columns), _led(own.volume, rest))


def _ragged_sums(grouping: Grouping, left: Any, right: Any, order: Any, bounds: Any) -> Any:
    """Sorts rows by group, and adds up the outer products of each group."""
    x, y, _ = (value.local for value in grouping.instruction.inputs)
    out = grouping.instruction.outputs[0]
    inner, columns = grouping.rest(x), grouping.rest(y)
    dimensions = lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((0,), (0,)), ((), ())),
        lhs_ragged_dimensions=[0],
        rhs_group_dimensions=[],
    )
    sums = lax.ragged_dot_general(
        _sorted(grouping, left, x, order, bounds),
        _sorted(grouping, right, y, order, bounds),
        bounds[1:] - bounds[:-1],
        dimensions,
        preferred_element_type=accumulator(out.dtype),
    )
    groups, rest = grouping.groups, grouping.rest(out.local)
    sums = sums.reshape(groups, *inner.sizes, *columns.sizes)
    return align(xp, sums, _led(groups, [*inner, *columns]), _led(groups, rest))


def _sorted(grouping: Grouping, rows: Any, shape: Shape, order: Any, bounds: Any) -> Any:
    """Returns the rows in the order of their groups, as a matrix; zeros for rows of no group."""
    inside = lax.iota(np.int32, grouping.rows.volume) < bounds[-1]
    at = _place(grouping, order, inside, grouping.own(shape))
    return _of_kernel(_rows_at(rows.reshape(rows.shape[0], -1), at))


def _of_kernel(factor: Any) -> Any:
    """Returns a factor as `ragged_dot` multiplies it: numbers of 8 bits in bfloat16."""
    return factor.astype(jnp.bfloat16) if factor.dtype.itemsize == 1 else factor


def _led(count: int, dims: Iterable[Dimension]) -> Shape:
    """Returns dims behind one that stands for rows or groups."""
    return Shape([Dimension("front_", count), *dims])


def _blocks_of_rows(grouping: Grouping, rows: Any, tables: Any, order: Any, bounds: Any) -> Any:
    """Multiplies the rows of each group block by block."""
    x, out = grouping.instruction.inputs[0].local, grouping.instruction.outputs[0]
    own, total, block = grouping.own(out.local), grouping.rows.volume, grouping.block
    summed = accumulator(out.dtype)
    padded = jnp.pad(order, (0, block), constant_values=total)

    def multiply(result: Any, group: Any) -> tuple[Any, None]:
        table, first, last = group

        def step(state: tuple[Any, Any]) -> tuple[Any, Any]:
            start, result = state
            row = lax.dynamic_slice_in_dim(padded, start, block)
            inside = start + lax.iota(np.int32, block) < last
            of_rows = _rows_at(rows, _place(grouping, row, inside, grouping.own(x)))
            product = xp.einsum(grouping.equation, [of_rows, table], summed)
            at = result.at[_place(grouping, row, inside, own)]
            if own == grouping.rows:
                return start + block, at.set(product, mode="drop", unique_indices=True)
            return start + block, at.add(product, mode="drop")

        return lax.while_loop(lambda state: state[0] < last, step, (first, result))[1], None

    blank = jnp.zeros((own.volume, *grouping.rest(out.local).sizes), summed)
    return lax.scan(multiply, blank, (tables, bounds[:-1], bounds[1:]))[0]


def _sums_of_blocks(grouping: Grouping, left: Any, right: Any, order: Any, bounds: Any) -> Any:
    """Adds up the products of the rows of each group block by block."""
    x, y, _ = (value.local for value in grouping.instruction.inputs)
    out = grouping.instruction.outputs[0]
    total, block, summed = grouping.rows.volume, grouping.block, accumulator(out.dtype)
    padded = jnp.pad(order, (0, block), constant_values=total)
    blank = jnp.zeros(grouping.rest(out.local).sizes, summed)

    def add_up(_: None, group: Any) -> tuple[None, Any]:
        first, last = group

        def step(state: tuple[Any, Any]) -> tuple[Any, Any]:
            start, result = state
            row = lax.dynamic_slice_in_dim(padded, start, block)
            inside = start + lax.iota(np.int32, block) < last
            factors = [
                _rows_at(array, _place(grouping, row, inside, grouping.own(shape)))
                for array, shape in ((left, x), (right, y))
            ]
            return start + block, result + xp.einsum(grouping.equation, factors, summed)

        return None, lax.while_loop(lambda state: state[0] < last, step, (first, blank))[1]

    return lax.scan(add_up, None, (bounds[:-1], bounds[1:]))[1]


def _place(grouping: Grouping, row: Any, inside: Any, own: Shape) -> Any:
    """Returns the positions of rows in a tensor; one past its end for rows outside."""
    index = grouping.index(row, own)
    return jnp.where(inside, 0 if index is None else index, own.volume)


def _rows_at(array: Any, index: Any) -> Any:
    """Returns the rows of an array at an index; zeros for those past its end."""
    return array.at[index].get(mode="fill", fill_value=0)


EMITTERS: Mapping[str, Emitter] = {"grouped_einsum": _looked_up, "grouped_outer": _summed}
