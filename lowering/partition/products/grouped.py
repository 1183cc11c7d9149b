"""Partition rules of grouped products: for every axis, the dim that it splits (`splits`).

What an axis splits says what each device computes:

- Rows: each device multiplies its own positions.
- The dim of the groups: each device multiplies the rows of its own groups, and has zeros for all
  others. Looked-up results are then partial sums; outer products stay split by group.
- A dim that is summed over: the results are partial sums. A dim that is kept is local.
- None: what the axis splits is gathered; for w, that is the matrices of all groups.
"""

from __future__ import annotations

from collections.abc import Sequence

from meshdsl.layouts.mesh import Mesh
from meshdsl.layouts.tensor_layout import TensorLayout
from meshdsl.lowering.parameters import AlongDim
from meshdsl.lowering.partition.splits import layouts_by_split
from meshdsl.lowering.partition.strategy import (
    Case,
    Strategies,
    Strategy,
    Work,
    bytes_moved,
    offer,
)
from meshdsl.lowering.program import Value
from meshdsl.lowering.writing.builder import INT32, BlockBuilder
from meshdsl.tensors.dims import Shape


def grouped(case: Case) -> Strategy | Strategies:
    """A grouped product is local once every axis has its dim."""
    op, mesh = case.operation, case.mesh
    (x, y, group), (out,), dim = op.inputs, op.outputs, op.params["dim"]
    tensors, given = (x, y, group, out), (*case.operands, *case.results)
    shapes = [tensor.shape for tensor in tensors]
    ways = [*layouts_by_split(shapes, given, mesh)]

    def work(layouts: Sequence[TensorLayout]) -> Work:
        rows = zip(tensors[:3], given[:3], layouts[:3], strict=True)
        moves = [*rows, (out, layouts[3], given[3])]
        return Work(bytes_moved(moves, mesh), _flops(shapes, layouts, dim, mesh))

    def strategy(layouts: Sequence[TensorLayout]) -> Strategy:
        of_groups = layouts[1 if y.shape.find(dim) else 3].axes(dim)
        count = (y if y.shape.find(dim) else out).shape.get(dim)

        def emit(builder: BlockBuilder, inputs: Sequence[Value]) -> Sequence[Value]:
            summed = [n for n in group.shape.names if out.shape.find(n) is None]
            numbers = inputs[2]
            if numbers.dtype != INT32:
                numbers = builder.one("cast", (numbers,), numbers.shape, INT32, numbers.layout)
            numbers = builder.mask_pads(numbers, summed, -1)
            numbers = builder.local_indices(numbers, count, of_groups)
            kept = {*out.shape.names, *group.shape.names, dim}
            factors = [
                builder.mask_pads(value, [n for n in value.shape.names if n not in kept], 0)
                for value in inputs[:2]
            ]
            here = layouts[3].add_partial([a for v in inputs[:2] for a in v.layout.partial_axes])
            params: AlongDim = {"dim": dim}
            return builder.add(op.name, (*factors, numbers), [(out.shape, out.dtype, here)], params)

        used = frozenset().union(*(layout.split_axes for layout in layouts))
        return Strategy(tuple(layouts[:3]), (layouts[3],), emit, linear=op.linear, fixed=used)

    return offer(ways, work, strategy)


def _flops(shapes: Sequence[Shape], layouts: Sequence[TensorLayout], dim: str, mesh: Mesh) -> float:
    """Returns the local multiplications and additions; groups are as large as each other."""
    local = [layout.local(shape, mesh) for layout, shape in zip(layouts, shapes, strict=True)]
    sizes = {each.name: each.size for shape in local for each in shape}
    total = 2.0 * sizes.pop(dim)
    for size in sizes.values():
        total *= size
    return total / next(shape.get(dim).size for shape in shapes if shape.find(dim))


RULES = {"grouped_einsum": grouped, "grouped_outer": grouped}
