"""Partition rule of einsum: for every axis, the dim of the product that it splits (`splits`).

The strategies differ in what they move before, in what they compute, and in what they reduce or
move after.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from meshdsl.layouts.mesh import Mesh
from meshdsl.layouts.tensor_layout import TensorLayout
from meshdsl.lowering.communication.reshard import reshard_cost
from meshdsl.lowering.partition.splits import layouts_by_split
from meshdsl.lowering.partition.strategy import Case, Strategies, Strategy, Work
from meshdsl.lowering.program import Value
from meshdsl.lowering.writing.builder import BlockBuilder
from meshdsl.tensors.dims import Shape
from meshdsl.tracing.graph import Operation

_Layouts = tuple[TensorLayout, ...]


@dataclass(frozen=True)
class Product:
    """The shapes of one einsum and the layouts its tensors have by the layout rules.

    `itemsize` is that of the factors; `result` is that of the product, which may be wider.
    """

    shapes: tuple[Shape, Shape, Shape]
    layouts: tuple[TensorLayout, TensorLayout, TensorLayout]
    itemsize: int
    mesh: Mesh
    result: int


@lru_cache(maxsize=1 << 12)
def offered(
    product: Product, beside_agreed: bool = False
) -> tuple[tuple[_Layouts, ...], tuple[Work, ...]]:
    """Returns the layouts of operands and result by each strategy, and what it costs."""
    shapes, given = product.shapes, product.layouts
    layouts = tuple(layouts_by_split(shapes, given, product.mesh, beside_agreed))
    return layouts, tuple(_work(product, each) for each in layouts)


def _work(product: Product, layouts: _Layouts) -> Work:
    size, mesh = product.itemsize, product.mesh
    wire = sum(
        reshard_cost(shape, size, have, take, mesh)
        for shape, have, take in zip(
            product.shapes[:2], product.layouts[:2], layouts[:2], strict=True
        )
    )
    wire += reshard_cost(product.shapes[2], product.result, layouts[2], product.layouts[2], mesh)
    return Work(wire, flops(product.shapes, layouts[0], layouts[1], mesh))


def flops(shapes: Sequence[Shape], x: TensorLayout, y: TensorLayout, mesh: Mesh) -> float:
    """Returns the local multiplications and additions of a product."""
    dims = {d.name: d.size for shape in shapes[:2] for d in shape}
    total = 2.0
    for name, size in dims.items():
        axes = x.axes(name) or y.axes(name)
        total *= -(-size // mesh.extent(axes))
    return total


def einsum(case: Case) -> Strategy | Strategies:
    """A product is local once every axis has its dim; contracted split dims leave partial sums."""
    layouts, work = offered(_product(case))
    if len(layouts) == 1:
        return _strategy(case.operation, layouts[0])
    return Strategies(work, lambda number: _strategy(case.operation, layouts[number]))


def every_strategy(case: Case) -> Strategies:
    """Returns the strategies of a product beside those that its tensors agree on, too.

    They pay only where products share what they move.
    """
    layouts, work = offered(_product(case), beside_agreed=True)
    return Strategies(work, lambda number: _strategy(case.operation, layouts[number]))


def _product(case: Case) -> Product:
    (x, y), (out,) = case.operation.inputs, case.operation.outputs
    return Product(
        (x.shape, y.shape, out.shape),
        (case.operands[0], case.operands[1], case.results[0]),
        x.dtype.itemsize,
        case.mesh,
        out.dtype.itemsize,
    )


def _strategy(op: Operation, layouts: _Layouts) -> Strategy:
    (left, right, result), (out,) = layouts, op.outputs

    def emit(builder: BlockBuilder, inputs: Sequence[Value]) -> Sequence[Value]:
        through = [axis for value in inputs for axis in value.layout.partial_axes]
        here = result.add_partial(through)
        factors = [
            builder.mask_pads(v, [n for n in v.shape.names if out.shape.find(n) is None], 0)
            for v in inputs
        ]
        return builder.add("einsum", factors, [(out.shape, out.dtype, here)])

    used = left.split_axes | right.split_axes
    return Strategy((left, right), (result,), emit, linear=op.linear, fixed=used)


RULES = {"einsum": einsum}
