"""Primitives that move positions and compute nothing: broadcasts, reshapes, transpositions."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import meshdsl.ops as ops
from meshdsl.imports.jax import conversion, inference
from meshdsl.imports.jax.arrays import Array, Place, plain, spare, stretched
from meshdsl.imports.jax.conversion import Unfit
from meshdsl.imports.jax.inference import Dims
from meshdsl.imports.jax.rules.rule import Rule, Table
from meshdsl.tensors.dims import Dimension

# Broadcasts.


def _infer_broadcast(site: inference.Site, operands: list[Dims]) -> list[Dims]:
    sizes, places = site.sizes(), site.params["broadcast_dimensions"]
    own = site.operand_sizes()
    nodes: list[int | None] = [None] * len(sizes)
    weak = [True] * len(sizes)
    for mine, place in enumerate(places):
        if own[mine] == sizes[place]:
            nodes[place] = operands[0].nodes[mine]
            weak[place] = operands[0].weak[mine]
    return [Dims(_filled(site, nodes, sizes), tuple(weak))]


def _filled(
    site: inference.Site, nodes: Sequence[int | None], sizes: Sequence[int]
) -> tuple[int, ...]:
    """Returns nodes with new ones in place of None."""
    pairs = zip(nodes, sizes, strict=True)
    return tuple(site.new(size) if node is None else node for node, size in pairs)


def _broadcast(site: conversion.Site, operands: list[Array]) -> list[Array]:
    x, sizes = operands[0], tuple(site.sizes())
    where = site.params["broadcast_dimensions"]
    x = stretched(x, tuple(sizes[place] for place in where))
    places: list[Place] = [None] * len(sizes)
    for names, place in zip(x.places, where, strict=True):
        places[place] = names
    return [replace(x, places=tuple(places), sizes=sizes)]


# Order and positions of size one.


def _infer_transpose(site: inference.Site, operands: list[Dims]) -> list[Dims]:
    return [operands[0].pick(site.params["permutation"])]


def _transposed(site: conversion.Site, operands: list[Array]) -> list[Array]:
    return [operands[0].pick(site.params["permutation"])]


def _infer_squeeze(site: inference.Site, operands: list[Dims]) -> list[Dims]:
    gone = site.params["dimensions"]
    return [operands[0].pick([p for p in range(len(operands[0].nodes)) if p not in gone])]


def _squeezed(site: conversion.Site, operands: list[Array]) -> list[Array]:
    gone = site.params["dimensions"]
    x = without_ones(operands[0])
    return [x.pick([p for p in range(len(x.sizes)) if p not in gone])]


def without_ones(x: Array) -> Array:
    """Returns an array whose tensor lacks the positions of size one."""
    for place, (names, size) in enumerate(zip(x.places, x.sizes, strict=True)):
        if size == 1 and names is not None:
            tensor = x.tensor
            for name in names:
                tensor = ops.index(tensor, name, 0)
            places = tuple(None if p == place else q for p, q in enumerate(x.places))
            x = replace(x, tensor=tensor, places=places)
    return x


# Reshapes.

Group = tuple[tuple[int, ...], tuple[int, ...]]


def groups(before: Sequence[int], after: Sequence[int]) -> Iterator[Group]:
    """Yields the smallest runs of positions before and after a reshape that hold the same elements.

    Positions of size one are in none.
    """
    left = [p for p, size in enumerate(before) if size != 1]
    right = [p for p, size in enumerate(after) if size != 1]
    while left:
        mine, theirs = [left.pop(0)], [right.pop(0)]
        while (a := math.prod(before[p] for p in mine)) != (
            b := math.prod(after[p] for p in theirs)
        ):
            if a < b:
                mine.append(left.pop(0))
            else:
                theirs.append(right.pop(0))
        yield tuple(mine), tuple(theirs)


def _infer_reshape(site: inference.Site, operands: list[Dims]) -> list[Dims]:
    before, after = site.operand_sizes(), site.sizes()
    nodes: list[int | None] = [None] * len(after)
    weak = [True] * len(after)
    if site.params.get("dimensions") is not None:
        return [site.fresh(after)]
    for mine, theirs in groups(before, after):
        own = [operands[0].nodes[p] for p in mine]
        if all(operands[0].weak[p] for p in mine):
            if len(mine) == len(theirs) == 1:
                nodes[theirs[0]] = own[0]
            continue
        for place in theirs:
            weak[place] = False
        if len(mine) == len(theirs) == 1:
            nodes[theirs[0]] = own[0]
            continue
        _regroup(site, own, [before[p] for p in mine], theirs, [after[p] for p in theirs], nodes)
    return [Dims(_filled(site, nodes, after), tuple(weak))]


def _regroup(
    site: inference.Site,
    own: list[int],
    sizes: list[int],
    places: Sequence[int],
    wanted: Sequence[int],
    nodes: list[int | None],
) -> None:
    """Gives nodes to results, by splitting and merging; both where sizes divide one another."""
    if len(own) == 1:
        for place, size in zip(places, wanted, strict=True):
            nodes[place] = site.new(size)
        site.classes.regroup(own[0], [nodes[place] or 0 for place in places])
        return
    factors = list(zip(own, sizes, strict=True))
    for place, size in zip(places, wanted, strict=True):
        if factors[0][1] == size:
            nodes[place] = factors.pop(0)[0]
            continue
        parts: list[int] = []
        left = size
        while left > 1:
            node, have = factors.pop(0)
            if left % have == 0:
                parts.append(node)
                left //= have
            elif have % left == 0:
                outer, inner = site.new(left), site.new(have // left)
                rest = _split_further(site, node, (outer, inner), (left, have // left), factors)
                parts.append(rest)
                left = 1
            else:  # no common factors: they become one dim, and that is split
                return
        if len(parts) == 1:
            nodes[place] = parts[0]
        else:
            whole = nodes[place] = site.new(size)
            site.classes.regroup(whole, parts)


def _split_further(
    site: inference.Site,
    node: int,
    parts: tuple[int, int],
    sizes: tuple[int, int],
    factors: list[tuple[int, int]],
) -> int:
    """Splits a dim in two: returns the outer part, and puts the inner one first in line."""
    site.classes.regroup(node, parts)
    factors.insert(0, (parts[1], sizes[1]))
    return parts[0]


def _reshaped(site: conversion.Site, operands: list[Array]) -> list[Array]:
    x, sizes = without_ones(operands[0]), tuple(site.sizes())
    if site.params.get("dimensions") is not None:
        raise Unfit("in another order than row by row")
    labels, given = site.outputs[0], site.inputs[0]
    for mine, _ in groups(x.sizes, sizes):
        known = [x.places[p] is None for p in mine]
        if any(known) and not all(known):
            x = plain(x, given, [p for p, lacking in zip(mine, known, strict=True) if lacking])
    places: list[Place] = [None] * len(sizes)
    for mine, theirs in groups(x.sizes, sizes):
        if x.places[mine[0]] is None:
            continue
        x, dims = _regrouped(x, mine, [sizes[p] for p in theirs], [labels[p] for p in theirs])
        for place, names in zip(theirs, dims, strict=True):
            places[place] = names
    return [replace(x, places=tuple(places), sizes=sizes)]


def _regrouped(
    x: Array, mine: Sequence[int], sizes: Sequence[int], labels: Sequence[str]
) -> tuple[Array, list[tuple[str, ...]]]:
    """Returns an array with dims that make up the results' positions, and these dims."""
    names = [name for p in mine for name in x.places[p] or ()]
    tensor = x.tensor
    dims_of_results: list[tuple[str, ...]] = []
    position = 0
    for size, label in zip(sizes, labels, strict=True):
        parts: list[str] = []
        left = size
        while left > 1:
            name = names[position]
            have = tensor.shape.get(name).size
            if left % have == 0:
                left //= have
                position += 1
            elif have % left == 0:
                outer = spare(label, tensor)
                inner = spare(f"{outer}_rest", tensor)
                into = [Dimension(outer, left), Dimension(inner, have // left)]
                tensor = ops.split(tensor, name, into)
                names[position : position + 1] = [outer, inner]
                name, left = outer, 1
                position += 1
            else:
                return _through_one(x, mine, sizes)
            parts.append(name)
        dims_of_results.append(tuple(parts))
    places = tuple(None if p in mine else q for p, q in enumerate(x.places))
    return replace(x, tensor=tensor, places=places), dims_of_results


def _through_one(
    x: Array, mine: Sequence[int], sizes: Sequence[int]
) -> tuple[Array, list[tuple[str, ...]]]:
    """Merges positions into one dim, and splits that."""
    names = [name for p in mine for name in x.places[p] or ()]
    whole = spare("_".join(names), x.tensor)
    tensor = ops.merge(x.tensor, names, whole) if len(names) > 1 else x.tensor
    whole = whole if len(names) > 1 else names[0]
    parts: list[str] = []
    for number in range(len(sizes)):
        parts.append(spare(f"{whole}_{number}", tensor))
    into = [Dimension(n, s) for n, s in zip(parts, sizes, strict=True)]
    tensor = ops.split(tensor, whole, into)
    places = tuple(None if p in mine else q for p, q in enumerate(x.places))
    return replace(x, tensor=tensor, places=places), [(name,) for name in parts]


# Ramps.


def _infer_iota(site: inference.Site, operands: list[Dims]) -> list[Dims]:
    sizes, along = site.sizes(), site.params["dimension"]
    nodes = tuple(
        site.new(size, hint="position" if p == along else "") for p, size in enumerate(sizes)
    )
    return [Dims(nodes, tuple(p != along for p in range(len(sizes))))]


def _iota(site: conversion.Site, operands: list[Array]) -> list[Array]:
    sizes, along = site.sizes(), site.params["dimension"]
    dim = Dimension(site.outputs[0][along], sizes[along])
    dtype = site.dtype()
    tensor = ops.arange(dim, dtype) if dtype.kind in "iu" else ops.cast(ops.arange(dim), dtype)
    places: list[Place] = [None] * len(sizes)
    places[along] = (dim.name,)
    return [Array(tensor, tuple(places), tuple(sizes))]


TABLE: Table = {
    "broadcast_in_dim": Rule(_infer_broadcast, _broadcast),
    "iota": Rule(_infer_iota, _iota),
    "reshape": Rule(_infer_reshape, _reshaped),
    "squeeze": Rule(_infer_squeeze, _squeezed),
    "transpose": Rule(_infer_transpose, _transposed),
}
