"""Products: `dot_general`, of which einsum, matmul and tensordot are made."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

import meshdsl.ops as ops
from meshdsl.imports.jax import conversion, inference
from meshdsl.imports.jax.arrays import Array, fit, merged, parted, renamed
from meshdsl.imports.jax.inference import Dims
from meshdsl.imports.jax.rules.rule import Rule, Table
from meshdsl.tensors.dims import Shape, unused
from meshdsl.tensors.tensor import Tensor


def _infer(site: inference.Site, operands: list[Dims]) -> list[Dims]:
    (over_x, over_y), (batch_x, batch_y) = site.params["dimension_numbers"]
    x, y = operands
    for a, b in zip(batch_x, batch_y, strict=True):
        if x.weak[a] or y.weak[b]:
            site.classes.later(x.nodes[a], y.nodes[b])
        else:
            site.unify(x.nodes[a], y.nodes[b])
    for a, b in zip(over_x, over_y, strict=True):
        if x.weak[a] or y.weak[b]:
            site.classes.later(x.nodes[a], y.nodes[b])
        else:
            site.classes.contract(x.nodes[a], y.nodes[b], site.source, site.name)
    batch = [
        (y.nodes[b], y.weak[b]) if x.weak[a] else (x.nodes[a], False)
        for a, b in zip(batch_x, batch_y, strict=True)
    ]
    free_x = [p for p in range(len(x.nodes)) if p not in (*over_x, *batch_x)]
    free_y = [p for p in range(len(y.nodes)) if p not in (*over_y, *batch_y)]
    every = [
        *batch,
        *((x.nodes[p], x.weak[p]) for p in free_x),
        *((y.nodes[p], y.weak[p]) for p in free_y),
    ]
    return [Dims(tuple(node for node, _ in every), tuple(weak for _, weak in every))]


def _product(site: conversion.Site, operands: list[Array]) -> list[Array]:
    """Multiplies by name, once every dim has one name in both operands and no other dim has it."""
    (over_x, over_y), (batch_x, batch_y) = site.params["dimension_numbers"]
    x, y = operands
    pairs = [*zip(batch_x, batch_y, strict=True), *zip(over_x, over_y, strict=True)]
    for a, b in pairs:
        x, y = _alike(x, a, y, b)
    free_x = [p for p in range(len(x.sizes)) if p not in (*over_x, *batch_x)]
    free_y = [p for p in range(len(y.sizes)) if p not in (*over_y, *batch_y)]
    labels = site.outputs[0]
    count = len(batch_x)
    x = _free_of(x, free_x, labels[count : count + len(free_x)])
    y = _free_of(y, free_y, labels[count + len(free_x) :])
    x, y = _distinct(x, y, pairs, free_x, free_y, labels[:count])
    factor = 1
    summed: list[str] = []
    for a, b in zip(over_x, over_y, strict=True):
        of_x, of_y = x.places[a], y.places[b]
        if of_x is None and of_y is None:
            factor *= x.sizes[a]
        summed += of_x or of_y or ()
    tensor = _multiplied(x.tensor, y.tensor, summed, site)
    places = [
        *(x.places[a] or y.places[b] for a, b in zip(batch_x, batch_y, strict=True)),
        *(x.places[p] for p in free_x),
        *(y.places[p] for p in free_y),
    ]
    tensor = tensor * factor if factor != 1 else tensor
    return [Array(tensor, tuple(places), site.sizes())]


def _alike(x: Array, a: int, y: Array, b: int) -> tuple[Array, Array]:
    """Returns operands whose paired positions have as many dims, of the same sizes."""
    mine, theirs = x.places[a], y.places[b]
    if mine is None or theirs is None or x.factors(a) == y.factors(b):
        return x, y
    if len(mine) > 1 and len(theirs) > 1:
        return merged(x, a), merged(y, b)
    if len(mine) > 1:
        return x, parted(y, b, _fresh(mine, y.tensor), x.factors(a))
    return parted(x, a, _fresh(theirs, x.tensor), y.factors(b)), y


def _fresh(names: Sequence[str], tensor: Tensor) -> list[str]:
    """Returns names that a tensor does not have, like others."""
    fresh: list[str] = []
    for name in names:
        while tensor.shape.find(name) is not None or name in fresh:
            name += "_"
        fresh.append(name)
    return fresh


def _free_of(x: Array, free: Sequence[int], labels: Sequence[str]) -> Array:
    """Gives the free dims of an operand the names that they have in the result."""
    wanted = dict(zip(free, labels, strict=True))
    names = [
        wanted.get(p, "" if q is None else q[0] if len(q) == 1 else "")
        for p, q in enumerate(x.places)
    ]
    used = {n for p, n in enumerate(names) if p not in wanted and n}
    for label in wanted.values():
        if label in used:  # a dim that is summed over has it: that one gives way
            for p, name in enumerate(names):
                if p not in wanted and name == label:
                    names[p] = unused(label, x.tensor.shape)
    for p, q in enumerate(x.places):
        if q is not None and len(q) > 1 and set(q) & set(filter(None, names)):
            x = merged(x, p)
            names[p] = names[p] or x.name(p)
    return fit(x, [name or f"_{p}" for p, name in enumerate(names)])


def _distinct(
    x: Array,
    y: Array,
    pairs: Sequence[tuple[int, int]],
    free_x: Sequence[int],
    free_y: Sequence[int],
    batch: Sequence[str],
) -> tuple[Array, Array]:
    """Returns operands in which paired dims have one name, and no others do."""
    paired = [(a, b) for a, b in pairs if x.places[a] is not None and y.places[b] is not None]
    free_names = {n for p in free_x for n in x.places[p] or ()}
    clash = [p for p in free_y if free_names.intersection(y.places[p] or ())]
    for p in clash:  # several dims at one position, which are those of x
        y = merged(y, p)
        y = renamed(y, {y.name(p): _fresh([y.name(p)], x.tensor)[0]})
    of_x: dict[str, str] = {}
    of_y: dict[str, str] = {}
    every_x, every_y = x.tensor.shape.names, y.tensor.shape.names
    for a, b in paired:
        for mine, theirs in zip(x.places[a] or (), y.places[b] or (), strict=True):
            others = {*every_x, *every_y} - {mine, theirs}
            lone_x = mine not in every_y or mine == theirs
            lone_y = theirs not in every_x or mine == theirs
            name = mine if lone_x else theirs if lone_y else mine
            used = others | set(of_x.values())
            while name in used or (not lone_x and not lone_y and name in (mine, theirs)):
                name += "_"
            of_x[mine] = of_y[theirs] = name
    # A dim of one operand alone must not have the name of another dim of the other operand.
    x, y = renamed(x, of_x), renamed(y, of_y)
    shared = {n for a, b in paired for n in x.places[a] or ()}
    for n in set(x.tensor.shape.names) & set(y.tensor.shape.names) - shared:
        y = renamed(y, {n: _fresh([n], x.tensor)[0]})
    return x, y


def _multiplied(x: Tensor, y: Tensor, summed: Sequence[str], site: conversion.Site) -> Tensor:
    """Returns the product in the result's dtype; dims of one operand are summed alone first."""
    dtype = site.dtype()
    if x.dtype != dtype or y.dtype != dtype:
        x, y = ops.cast(x, dtype), ops.cast(y, dtype)
    for name in summed:
        if y.shape.find(name) is None:
            x = ops.sum(x, name)
        elif x.shape.find(name) is None:
            y = ops.sum(y, name)
    both = [n for n in summed if x.shape.find(n) is not None]
    if not both or x.dtype == np.bool_:
        product = ops.multiply(x, y)
        return ops.sum(product, both) if both else product
    every = Shape(dict.fromkeys([*x.shape, *y.shape]))
    return ops.einsum(x, y, out=every.without(both))


TABLE: Table = {"dot_general": Rule(_infer, _product)}
