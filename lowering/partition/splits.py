"""Splits: which dims of a product the axes may split, and the layouts that follow from a choice.

If all tensors that have a dim split it over an axis, the axis splits that dim of the product.
Otherwise the axis may split any dim that it splits in an operand or in the result, or none. The
layout of the result comes first, then that of the first operand: among strategies of equal cost
the first is chosen.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

from meshdsl.layouts.mesh import Mesh
from meshdsl.layouts.tensor_layout import TensorLayout
from meshdsl.tensors.dims import Shape


def layouts_by_split(
    shapes: Sequence[Shape],
    given: Sequence[TensorLayout],
    mesh: Mesh,
    beside_agreed: bool = False,
) -> Iterator[tuple[TensorLayout, ...]]:
    """Yields layouts of the operands and the result, for each choice of a dim for every axis.

    Args:
        shapes: of the operands, then of the result.
        given: the layouts that they have by the layout rules.
        beside_agreed: an axis may also split other dims than those that all tensors split over it.
    """
    candidates = {axis: _candidates(shapes, given, axis, beside_agreed) for axis in mesh.names}
    axes = [axis for axis, dims in candidates.items() if dims]
    for dims in itertools.product(*(candidates[axis] for axis in axes)):
        yield _layouts(shapes, given, dict(zip(axes, dims, strict=True)))


def _candidates(
    shapes: Sequence[Shape], given: Sequence[TensorLayout], axis: str, beside_agreed: bool
) -> list[str | None]:
    """Returns the dims that an axis may split: the agreed ones if there are any, else all."""
    of_axis = [layout.dim_of(axis) for layout in _result_first(given)]
    dims = list(dict.fromkeys(dim for dim in of_axis if dim is not None))
    agreed = [dim for dim in dims if _agreed(shapes, given, axis, dim)]
    if agreed:
        return [*dims] if beside_agreed else [*agreed]
    return [*dims, None] if dims else []


def _agreed(shapes: Sequence[Shape], given: Sequence[TensorLayout], axis: str, dim: str) -> bool:
    """Whether several tensors have a dim, and each of them splits it over an axis."""
    have = [i for i, shape in enumerate(shapes) if shape.find(dim) is not None]
    return len(have) > 1 and all(given[i].dim_of(axis) == dim for i in have)


def _layouts(
    shapes: Sequence[Shape], given: Sequence[TensorLayout], choice: Mapping[str, str | None]
) -> tuple[TensorLayout, ...]:
    """Returns the layouts where each axis splits the dim chosen for it."""
    splits: dict[str, list[str]] = {}
    for axis, dim in choice.items():
        if dim is not None:
            splits.setdefault(dim, []).append(axis)
    for dim, axes in splits.items():
        for layout in _result_first(given):
            if set(layout.axes(dim)) >= set(axes):
                axes.sort(key=layout.axes(dim).index)
                break
    *operands, result = (
        TensorLayout.of({d: a for d, a in splits.items() if shape.find(d) is not None})
        for shape in shapes
    )
    left = [axis for d, axes in splits.items() if shapes[-1].find(d) is None for axis in axes]
    return *operands, result.add_partial(left)


def _result_first(given: Sequence[TensorLayout]) -> list[TensorLayout]:
    return [given[-1], *given[:-1]]
