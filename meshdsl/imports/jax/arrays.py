"""Arrays of JAX as named tensors: which dims of a tensor stand at which position.

A position is one dim of the tensor, several dims (a product, major first: what was merged and not
yet used as one), or None where all elements along it are equal, which the tensor lacks. So merging,
transposing and broadcasting cost nothing until an operation needs one dim.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import meshdsl.ops as ops
from meshdsl.tensors.dims import Dimension, unused
from meshdsl.tensors.tensor import Tensor

Place = tuple[str, ...] | None


@dataclass(frozen=True)
class Array:
    """A tensor that stands for an array.

    Attributes:
        places: the dims at each position. A tensor may have a dim at none of them: the two words
            of a random key.
        sizes: of all positions.
        number: its elements, if all are one number that is known.
    """

    tensor: Tensor
    places: tuple[Place, ...]
    sizes: tuple[int, ...]
    number: Any = None

    @staticmethod
    def of(tensor: Tensor, hidden: Sequence[str] = ()) -> Array:
        """Returns a tensor with its dims in their order, but for hidden ones."""
        dims = tensor.shape.without(hidden)
        return Array(tensor, tuple((name,) for name in dims.names), dims.sizes)

    @staticmethod
    def filled(number: Any, dtype: Any, sizes: Sequence[int]) -> Array:
        """Returns an array of one number."""
        number = number.item() if hasattr(number, "item") else number
        places = (None,) * len(sizes)
        return Array(ops.full([], number, dtype), places, tuple(sizes), number)

    def pick(self, order: Sequence[int]) -> Array:
        """Returns some positions, in the order given; those that are left out must be None."""
        places = tuple(self.places[p] for p in order)
        return replace(self, places=places, sizes=tuple(self.sizes[p] for p in order))

    def name(self, place: int) -> str:
        """Returns the dim at a position, which must be one."""
        names = self.places[place]
        assert names is not None
        assert len(names) == 1
        return names[0]

    def factors(self, place: int) -> tuple[int, ...]:
        """Returns the sizes of the dims at a position."""
        return tuple(self.tensor.shape.get(name).size for name in self.places[place] or ())


def renamed(array: Array, names: Mapping[str, str]) -> Array:
    """Returns an array with dims of its tensor renamed, all at once."""
    names = {old: new for old, new in names.items() if old != new}
    if not names:
        return array
    places = tuple(p if p is None else tuple(names.get(n, n) for n in p) for p in array.places)
    return replace(array, tensor=ops.rename(array.tensor, names), places=places)


def fit(array: Array, labels: Sequence[str]) -> Array:
    """Returns an array whose single dims have the names of their positions."""
    wanted = set(labels)
    for place, names in enumerate(array.places):
        if names is not None and len(names) > 1 and wanted.intersection(names):
            array = merged(array, place, labels[place])
    pairs = zip(array.places, labels, strict=True)
    wished = {p[0]: label for p, label in pairs if p is not None and len(p) == 1}
    others = set(array.tensor.shape.names) - set(wished)
    clash = {label: unused(label, array.tensor.shape) for label in others.intersection(labels)}
    return renamed(renamed(array, clash), wished)


def spare(name: str, tensor: Tensor) -> str:
    """Returns a name for a further dim of a tensor: this one, if it is free."""
    return name if tensor.shape.find(name) is None else unused(name, tensor.shape)


def merged(array: Array, place: int, label: str = "") -> Array:
    """Returns an array with one dim at a position which has several."""
    names = array.places[place]
    if names is None or len(names) == 1:
        return array
    whole = spare(label or "_".join(names), array.tensor)
    tensor = ops.merge(array.tensor, list(names), whole)
    places = tuple((whole,) if p == place else q for p, q in enumerate(array.places))
    return replace(array, tensor=tensor, places=places)


def single(array: Array, labels: Sequence[str]) -> Array:
    """Returns an array with one dim, or None, at each position, named as the labels say."""
    for place in range(len(array.places)):
        array = merged(array, place, labels[place])
    return fit(array, labels)


def plain(array: Array, labels: Sequence[str], only: Sequence[int] | None = None) -> Array:
    """Returns an array with one dim at each position (or at some), named as the labels say."""
    array = single(array, labels)
    lacking = [
        place
        for place, names in enumerate(array.places)
        if names is None and (only is None or place in only)
    ]
    if not lacking:
        return array
    new = [Dimension(labels[place], array.sizes[place]) for place in lacking]
    tensor = ops.broadcast(array.tensor, [*new, *array.tensor.shape])
    places = tuple(
        (labels[place],) if place in lacking else names for place, names in enumerate(array.places)
    )
    return replace(array, tensor=tensor, places=places)


def settled(array: Array, labels: Sequence[str]) -> Tensor:
    """Returns the tensor with one dim for each position, in their order, then hidden dims."""
    array = plain(array, labels)
    hidden = [name for name in array.tensor.shape.names if name not in labels]
    return ops.transpose(array.tensor, [*labels, *hidden])


def stretched(array: Array, sizes: Sequence[int]) -> Array:
    """Returns an array repeated to these sizes; where they differ, it has size one."""
    tensor, places = array.tensor, list(array.places)
    for place, (names, size) in enumerate(zip(array.places, array.sizes, strict=True)):
        if size != sizes[place]:
            for name in names or ():
                tensor = ops.index(tensor, name, 0)
            places[place] = None
    return replace(array, tensor=tensor, places=tuple(places), sizes=tuple(sizes))


def aligned(arrays: Sequence[Array], labels: Sequence[str]) -> tuple[list[Tensor], Array]:
    """Returns tensors whose dims pair up by name, and an array with the places of their result.

    Args:
        arrays: of one rank, or scalars.
        labels: of the result's positions.
    """
    rank = len(labels)
    sizes = tuple(
        max(each) for each in zip(*(a.sizes for a in arrays if len(a.sizes) == rank), strict=True)
    )
    full = [stretched(a, sizes) if len(a.sizes) == rank else a for a in arrays]
    having = [a for a in full if len(a.sizes) == rank]
    if _splits_clash(having, rank):
        full = [single(a, labels) if len(a.sizes) == rank else a for a in full]
    else:
        full = [fit(a, labels) if len(a.sizes) == rank else a for a in full]
        having = [a for a in full if len(a.sizes) == rank]
        full = [_regrouped(a, having) if len(a.sizes) == rank else a for a in full]
    having = [a for a in full if len(a.sizes) == rank]
    places = tuple(
        next((a.places[p] for a in having if a.places[p] is not None), None) for p in range(rank)
    )
    return [a.tensor for a in full], Array(full[0].tensor, places, sizes)


def _splits_clash(arrays: Sequence[Array], rank: int) -> bool:
    """Whether positions with several dims have other ones in another array."""
    every: list[str] = []
    for place in range(rank):
        products = {(a.places[place], a.factors(place)) for a in arrays if _is_product(a, place)}
        if len(products) > 1:
            return True
        every += [name for names, _ in products for name in names or ()]
    single_dims = {
        n for a in arrays for p in range(rank) if not _is_product(a, p) for n in a.places[p] or ()
    }
    return len(set(every)) < len(every) or bool(single_dims & set(every))


def _is_product(array: Array, place: int) -> bool:
    names = array.places[place]
    return names is not None and len(names) > 1


def _regrouped(array: Array, others: Sequence[Array]) -> Array:
    """Splits single dims where another array has several."""
    for place, names in enumerate(array.places):
        if names is None or len(names) > 1:
            continue
        for other in others:
            if _is_product(other, place):
                array = parted(array, place, other.places[place] or (), other.factors(place))
                break
    return array


def parted(array: Array, place: int, names: Sequence[str], sizes: Sequence[int]) -> Array:
    """Returns an array with the one dim at a position split into several."""
    assert math.prod(sizes) == array.sizes[place]
    dims = [Dimension(n, s) for n, s in zip(names, sizes, strict=True)]
    tensor = ops.split(array.tensor, array.name(place), dims)
    places = tuple(tuple(names) if p == place else q for p, q in enumerate(array.places))
    return replace(array, tensor=tensor, places=places)
