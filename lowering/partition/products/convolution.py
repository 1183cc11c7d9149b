"""Partition rule of convolution: einsum's, with windows.

A strategy chooses for every axis what it splits:

- a dim, as in einsum;
- the positions of the result along a dim of windows. Each device needs its part of the operand and
  a halo: what its windows reach of its neighbours' parts;
- the positions of the window. Halos are needed too, and the result is a partial sum. This is the
  gradient by the filters where space is split.

A strategy sends operands, halos and results.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from meshdsl.layouts.mesh import Mesh
from meshdsl.layouts.tensor_layout import TensorLayout
from meshdsl.lowering.communication.halos import HaloExchange, cut
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
            present = self.shapes[which].find(key) is not None and key not in slid
            return key if present else None
        number, way = key
        slide = self.slides[number]
        if which == 0:
            return slide.x
        return {(1, "window"): slide.window, (2, "out"): slide.out}.get((which, way))


@dataclass(frozen=True)
class Division:
    """The axes that split each key, major first, and the layouts of the three tensors by that."""

    splits: tuple[tuple[Key, tuple[str, ...]], ...]
    layouts: tuple[TensorLayout, TensorLayout, TensorLayout]

    def axes(self, key: Key) -> tuple[str, ...]:
        return dict(self.splits).get(key, ())


@lru_cache(maxsize=1 << 14)
def offered(product: Product) -> tuple[tuple[Division, ...], tuple[Work, ...]]:
    """Returns the divisions and what each costs; the first follows the layout of the result."""
    axes = [axis for axis in product.mesh.names if _candidates(product, axis)]
    options = itertools.product(*(_candidates(product, axis) for axis in axes))
    divisions = tuple(_division(product, dict(zip(axes, keys, strict=True))) for keys in options)
    return divisions, tuple(_work(product, division) for division in divisions)


def _candidates(product: Product, axis: str) -> list[Key | None]:
    """Returns what an axis may split: the keys that all tensors agree on if any, else all."""
    keys: dict[Key, None] = {}
    for which in (2, 0, 1):
        dim = product.layouts[which].dim_of(axis)
        if dim is not None:
            keys.update(dict.fromkeys(product.keys(which, dim)))
    agreed = [key for key in keys if _agreed(product, axis, key)]
    return [*agreed] or ([*keys, None] if keys else [])


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
            order = product.layouts[which].axes(dim) if dim is not None else ()
            if set(order) >= set(axes):
                axes.sort(key=order.index)
                break
    layouts = [
        TensorLayout.of({d: a for k, a in splits.items() if (d := product.dim(i, k)) is not None})
        for i in range(3)
    ]
    left = [axis for k, axes in splits.items() if product.dim(2, k) is None for axis in axes]
    return Division(
        tuple((key, tuple(axes)) for key, axes in splits.items()),
        (layouts[0], layouts[1], layouts[2].add_partial(left)),
    )


def _work(product: Product, division: Division) -> Work:
    size, mesh, layouts = product.itemsize, product.mesh, division.layouts
    before = zip(product.shapes[:2], product.layouts[:2], layouts[:2], strict=True)
    wire = sum(reshard_cost(shape, size, have, take, mesh) for shape, have, take in before)
    wire += reshard_cost(product.shapes[2], product.result, layouts[2], product.layouts[2], mesh)
    local = layouts[0].local(product.shapes[0], mesh)
    needed = {}
    for number, slide in enumerate(product.slides):
        halos = _cut(product, division, number)
        if halos is not None:
            needed[slide.x] = max(halos.length, local.get(slide.x).size)
    wide = math.prod(needed.get(d.name, d.size) for d in local)
    wire += (wide - local.volume) * size
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


def _cut(product: Product, division: Division, number: int) -> HaloExchange | None:
    """Returns the halo exchange of a slide's dim, or None if the dim is unsplit."""
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
    op, (operand, window, result) = case.operation, division.layouts
    (out,) = op.outputs

    def emit(builder: BlockBuilder, inputs: Sequence[Value]) -> Sequence[Value]:
        through = [axis for value in inputs for axis in value.layout.partial_axes]
        left, right = (_without_pads(builder, product, i, v) for i, v in enumerate(inputs))
        slides, shape, by_result = [], out.shape, []
        for number, slide in enumerate(product.slides):
            halos = _cut(product, division, number)
            if halos is not None:
                left = halos.gather(builder, left)
                if division.axes((number, "out")):
                    by_result.append(halos)
                    shape = halos.wide(shape, slide.out, case.mesh)
                else:
                    right = halos.widen(builder, right, slide.window)
            slides.append(halos.slide if halos else slide)
        params: Convolve = {"slides": tuple(slides)}
        here = result.add_partial(through)
        value = builder.one("convolve", (left, right), shape, out.dtype, here, **params)
        for halos in by_result:
            value = halos.narrow(builder, value, out.shape.get(halos.slide.out))
        return (value,)

    used = frozenset(axis for _, axes in division.splits for axis in axes)
    return Strategy((operand, window), (result,), emit, linear=op.linear, fixed=used)


def _without_pads(builder: BlockBuilder, product: Product, which: int, value: Value) -> Value:
    """Returns an operand with zeros in those of its pads that results of other positions read.

    These are the pads of dims that are summed over. Of the first operand they are also those of the
    dims of groups, which all three tensors have.
    """

    def mixed(name: str) -> bool:
        key = product.keys(which, name)[0]
        if product.dim(2, key) is None:
            return True
        # XLA:CPU makes some groups dense: a result then reads elements of other groups times 0,
        # which is NaN for those that are not finite.
        return which == 0 and isinstance(key, str) and product.dim(1, key) is not None

    return builder.mask_pads(value, filter(mixed, value.shape.names), 0)


RULES = {"convolve": convolve}
