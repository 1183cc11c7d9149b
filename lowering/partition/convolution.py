"""Partition rule of convolution: einsum's, with windows.

For every axis one dim is chosen that it splits: a dim as in einsum; or, of a dim met through
windows, the positions of the result (each device needs a part of the operand, and of its
neighbours' what its windows reach beyond its own: halos) or those of the window (the same, and what
is left is a partial sum: this is the gradient by the filters where space is split). A strategy
sends what is moved before, in halos and after.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from meshdsl.layouts.mesh import Mesh
from meshdsl.layouts.tensor_layout import TensorLayout
from meshdsl.lowering.communication.halos import Cut, cut
from meshdsl.lowering.communication.reshard import reshard_cost
from meshdsl.lowering.parameters import Convolve
from meshdsl.lowering.partition.strategy import Case, Strategies, Strategy, Work
from meshdsl.lowering.program import Value
from meshdsl.lowering.writing.builder import BlockBuilder
from meshdsl.tensors.dims import Shape
from meshdsl.tensors.slide import Slide

# What an axis can split: a dim by its name; or, of the slide with a number, "out" or "window".
Key = str | tuple[int, str]


@dataclass(frozen=True)
class Product:
    """The shapes of operand, window and result, and their layouts by the layout rules."""

    slides: tuple[Slide, ...]
    shapes: tuple[Shape, Shape, Shape]
    layouts: tuple[TensorLayout, TensorLayout, TensorLayout]
    itemsize: int
    mesh: Mesh
    result: int  # the item size of the result, which may be wider than that of the operands

    def keys(self, which: int, name: str) -> list[Key]:
        """Returns what an axis may split if it splits dim `name` of one of the three tensors."""
        for number, slide in enumerate(self.slides):
            if name == (slide.x, slide.window, slide.out)[which]:
                ways = (("out", "window"), ("window",), ("out",))[which]
                return [(number, way) for way in ways]
        return [name]

    def dim(self, which: int, key: Key) -> str | None:
        """Returns the dim of one of the three tensors that a key splits."""
        if isinstance(key, str):
            slid = [(s.x, s.window, s.out)[which] for s in self.slides]
            found = self.shapes[which].find(key) is not None and key not in slid
            return key if found else None
        number, way = key
        slide = self.slides[number]
        if which == 0:
            return slide.x
        return {(1, "window"): slide.window, (2, "out"): slide.out}.get((which, way))


@dataclass(frozen=True)
class Division:
    """Which axes split what, major first, and the layouts in which the three tensors are then."""

    splits: tuple[tuple[Key, tuple[str, ...]], ...]
    ends: tuple[TensorLayout, TensorLayout, TensorLayout]

    def axes(self, key: Key) -> tuple[str, ...]:
        return dict(self.splits).get(key, ())


@lru_cache(maxsize=1 << 14)
def offered(product: Product) -> tuple[tuple[Division, ...], tuple[Work, ...]]:
    """Returns the divisions, that by the layout of the result first, and what each costs."""
    axes = [axis for axis in product.mesh.names if _candidates(product, axis)]
    options = itertools.product(*(_candidates(product, axis) for axis in axes))
    divisions = tuple(_division(product, dict(zip(axes, keys, strict=True))) for keys in options)
    return divisions, tuple(_work(product, division) for division in divisions)


def _candidates(product: Product, axis: str) -> list[Key | None]:
    """Returns what an axis may split; only what all tensors agree on, where there is such."""
    found: dict[Key, None] = {}
    for which in (2, 0, 1):
        dim = product.layouts[which].dim_of(axis)
        if dim is not None:
            found.update(dict.fromkeys(product.keys(which, dim)))
    agreed = [key for key in found if _agreed(product, axis, key)]
    return [*agreed] or ([*found, None] if found else [])


def _agreed(product: Product, axis: str, key: Key) -> bool:
    have = [(i, dim) for i in range(3) if (dim := product.dim(i, key)) is not None]
    return len(have) > 1 and all(product.layouts[i].dim_of(axis) == dim for i, dim in have)


def _division(product: Product, chosen: Mapping[str, Key | None]) -> Division:
    splits: dict[Key, list[str]] = {}
    for axis, key in chosen.items():
        if key is not None:
            splits.setdefault(key, []).append(axis)
    for number in range(len(product.slides)):
        if (number, "out") in splits:  # the two at once would need windows of windows
            splits.pop((number, "window"), None)
    for key, axes in splits.items():
        for which in (2, 0, 1):
            dim = product.dim(which, key)
            held = product.layouts[which].axes(dim) if dim is not None else ()
            if set(held) >= set(axes):
                axes.sort(key=held.index)
                break
    ends = [
        TensorLayout.of({d: a for k, a in splits.items() if (d := product.dim(i, k)) is not None})
        for i in range(3)
    ]
    left = [axis for k, axes in splits.items() if product.dim(2, k) is None for axis in axes]
    return Division(
        tuple((key, tuple(axes)) for key, axes in splits.items()),
        (ends[0], ends[1], ends[2].add_partial(left)),
    )


def _work(product: Product, division: Division) -> Work:
    size, mesh, ends = product.itemsize, product.mesh, division.ends
    before = zip(product.shapes[:2], product.layouts[:2], ends[:2], strict=True)
    wire = sum(reshard_cost(shape, size, have, take, mesh) for shape, have, take in before)
    wire += reshard_cost(product.shapes[2], product.result, ends[2], product.layouts[2], mesh)
    held = ends[0].local(product.shapes[0], mesh)
    needed = {}
    for number, slide in enumerate(product.slides):
        found = _cut(product, division, number)
        if found is not None:
            needed[slide.x] = max(found.length, held.get(slide.x).size)
    wide = math.prod(needed.get(d.name, d.size) for d in held)
    wire += (wide - held.volume) * size
    return Work(wire, _flops(product, division))


def _flops(product: Product, division: Division) -> float:
    total = 2.0
    seen = set()
    for which in (2, 1, 0):
        for dim in product.shapes[which]:
            key = product.keys(which, dim.name)[0]
            if (which == 0 and not isinstance(key, str)) or key in seen:
                continue
            seen.add(key)
            total *= -(-dim.size // product.mesh.extent(division.axes(key)))
    return total


def _cut(product: Product, division: Division, number: int) -> Cut | None:
    """Returns how a slide's dim is cut, or None if it is whole."""
    slide, (_, window, out) = product.slides[number], product.shapes
    sizes = out.get(slide.out).size, window.get(slide.window).size
    for by_window, way in enumerate(("out", "window")):
        axes = division.axes((number, way))
        if axes:
            return cut(slide, *sizes, bool(by_window), axes, product.mesh)
    return None


def convolve(case: Case) -> Strategies:
    """Local on windows of the operand; contracted split dims leave partial sums."""
    op = case.operation
    (x, filters), (out,) = op.inputs, op.outputs
    product = Product(
        op.params["slides"],
        (x.shape, filters.shape, out.shape),
        (case.operands[0], case.operands[1], case.results[0]),
        x.dtype.itemsize,
        case.mesh,
        out.dtype.itemsize,
    )
    divisions, work = offered(product)
    return Strategies(work, lambda number: _strategy(case, product, divisions[number]))


def _strategy(case: Case, product: Product, division: Division) -> Strategy:
    op, (operand, window, result) = case.operation, division.ends
    (out,) = op.outputs

    def emit(builder: BlockBuilder, inputs: Sequence[Value]) -> Sequence[Value]:
        through = [axis for value in inputs for axis in value.layout.partial_axes]
        left, right = (_without_pads(builder, product, i, v) for i, v in enumerate(inputs))
        slides, shape, by_result = [], out.shape, []
        for number, slide in enumerate(product.slides):
            found = _cut(product, division, number)
            if found is not None:
                left = found.gather(builder, left)
                if division.axes((number, "out")):
                    by_result.append(found)
                    shape = found.wide(shape, slide.out, case.mesh)
                else:
                    right = found.widen(builder, right, slide.window)
            slides.append(found.slide if found else slide)
        params: Convolve = {"slides": tuple(slides)}
        here = result.add_partial(through)
        value = builder.one("convolve", (left, right), shape, out.dtype, here, **params)
        for found in by_result:
            value = found.narrow(builder, value, out.shape.get(found.slide.out))
        return (value,)

    used = frozenset(axis for _, axes in division.splits for axis in axes)
    return Strategy((operand, window), (result,), emit, linear=op.linear, fixed=used)


def _without_pads(builder: BlockBuilder, product: Product, which: int, value: Value) -> Value:
    """Returns an operand with zeros in the pads of the dims that are summed over."""
    summed = [n for n in value.shape.names if product.dim(2, product.keys(which, n)[0]) is None]
    return builder.mask_pads(value, summed, 0)


RULES = {"convolve": convolve}
