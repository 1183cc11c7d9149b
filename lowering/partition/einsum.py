"""Partition rule of einsum: for every axis, the dim of the product that it splits.

If all tensors that have a dim split it over an axis, the axis splits that dim of the product.
Otherwise the axis may split any dim that it splits in an operand or in the result, or none. The
strategies differ in what they move before, in what they compute, and in what they reduce or move
after. The layout of the result comes first, then that of the first operand.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from meshdsl.layouts.mesh import Mesh
from meshdsl.layouts.tensor_layout import TensorLayout
from meshdsl.lowering.communication.reshard import reshard_cost
from meshdsl.lowering.partition.strategy import Case, Strategies, Strategy, Work
from meshdsl.lowering.program import Value
from meshdsl.lowering.writing.builder import BlockBuilder
from meshdsl.tensors.dims import Shape
from meshdsl.tracing.graph import Operation

_Layouts = tuple[TensorLayout, TensorLayout, TensorLayout]


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
def offered(product: Product) -> tuple[tuple[_Layouts, ...], tuple[Work, ...]]:
    """Returns the layouts of operands and result by each strategy, and what it costs."""
    axes = [axis for axis in product.mesh.names if _candidates(product, axis)]
    every = itertools.product(*(_candidates(product, axis) for axis in axes))
    layouts = tuple(_layouts(product, dict(zip(axes, dims, strict=True))) for dims in every)
    return layouts, tuple(_work(product, each) for each in layouts)


def _candidates(product: Product, axis: str) -> list[str | None]:
    """Returns the dims that an axis may split: the agreed ones if there are any, else all.

    A dim is agreed on if every tensor that has it splits it over the axis.
    """
    out, x, y = (product.layouts[i].dim_of(axis) for i in (2, 0, 1))
    dims = list(dict.fromkeys(d for d in (out, x, y) if d is not None))
    agreed = [d for d in dims if _agreed(product, axis, d)]
    return [*agreed] or ([*dims, None] if dims else [])


def _agreed(product: Product, axis: str, dim: str) -> bool:
    have = [i for i, shape in enumerate(product.shapes) if shape.find(dim) is not None]
    return len(have) > 1 and all(product.layouts[i].dim_of(axis) == dim for i in have)


def _layouts(product: Product, choice: dict[str, str | None]) -> _Layouts:
    """Returns the layouts of operands and result where each axis splits the dim chosen for it."""
    out = product.shapes[2]
    splits: dict[str, list[str]] = {}
    for axis, dim in choice.items():
        if dim is not None:
            splits.setdefault(dim, []).append(axis)
    for dim, axes in splits.items():
        for layout in (product.layouts[2], *product.layouts[:2]):
            if set(layout.axes(dim)) >= set(axes):
                axes.sort(key=layout.axes(dim).index)
                break
    layouts = [
        TensorLayout.of({d: a for d, a in splits.items() if shape.find(d) is not None})
        for shape in product.shapes
    ]
    left = [axis for d, axes in splits.items() if out.find(d) is None for axis in axes]
    return layouts[0], layouts[1], layouts[2].add_partial(left)


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
    op = case.operation
    (x, y), (out,) = op.inputs, op.outputs
    product = Product(
        (x.shape, y.shape, out.shape),
        (case.operands[0], case.operands[1], case.results[0]),
        x.dtype.itemsize,
        case.mesh,
        out.dtype.itemsize,
    )
    layouts, work = offered(product)
    if len(layouts) == 1:
        return _strategy(op, layouts[0])
    return Strategies(work, lambda number: _strategy(op, layouts[number]))


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
