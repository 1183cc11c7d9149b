"""Primitives on runs of positions: slices, pads, joins, and slices at places known at run time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

import meshdsl.ops as ops
from meshdsl.imports.jax import conversion, inference
from meshdsl.imports.jax.arrays import Array, plain, single
from meshdsl.imports.jax.inference import Dims
from meshdsl.imports.jax.rules.rule import Rule, Table
from meshdsl.imports.jax.rules.shapes import without_ones
from meshdsl.tensors.tensor import Tensor


def resized(site: inference.Site, dims: Dims, operand: int = 0) -> Dims:
    """Returns the dims of a result whose positions are those of an operand, some of other sizes."""
    nodes, weak = [], []
    own = site.operand_sizes(operand)
    for node, is_weak, old, size in zip(dims.nodes, dims.weak, own, site.sizes(), strict=True):
        nodes.append(node if old == size else site.new(size, like=node))
        weak.append(is_weak)
    return Dims(tuple(nodes), tuple(weak))


# Slices.


def _infer_resized(site: inference.Site, operands: list[Dims]) -> list[Dims]:
    return [resized(site, operands[0])]


def _sliced(site: conversion.Site, operands: list[Array]) -> list[Array]:
    x = single(operands[0], site.inputs[0])
    starts, stops = site.params["start_indices"], site.params["limit_indices"]
    strides = site.params["strides"] or (1,) * len(starts)
    tensor = x.tensor
    for p, (start, stop, step) in enumerate(zip(starts, stops, strides, strict=True)):
        if x.places[p] is not None and (start, stop, step) != (0, x.sizes[p], 1):
            tensor = ops.slice(tensor, x.name(p), start, stop, step)
    return [replace(x, tensor=tensor, sizes=site.sizes())]


def _split(site: conversion.Site, operands: list[Array]) -> list[Array]:
    axis = site.params["axis"]
    x = single(operands[0], site.inputs[0])
    start, parts = 0, []
    for number, size in enumerate(site.params["sizes"]):
        tensor = x.tensor
        if x.places[axis] is not None:
            tensor = ops.slice(tensor, x.name(axis), start, start + size)
        parts.append(replace(x, tensor=tensor, sizes=site.sizes(number)))
        start += size
    return parts


def _infer_split(site: inference.Site, operands: list[Dims]) -> list[Dims]:
    axis, (x,) = site.params["axis"], operands
    results = []
    for size in site.params["sizes"]:
        part = site.new(size, like=x.nodes[axis])
        nodes = tuple(part if p == axis else n for p, n in enumerate(x.nodes))
        results.append(Dims(nodes, x.weak))
    return results


# Pads and joins.


def _infer_pad(site: inference.Site, operands: list[Dims]) -> list[Dims]:
    dims = resized(site, operands[0])
    padded = [any(each) for each in site.params["padding_config"]]
    return [Dims(dims.nodes, tuple(w and not p for w, p in zip(dims.weak, padded, strict=True)))]


def _padded(site: conversion.Site, operands: list[Array]) -> list[Array]:
    x, value = operands
    config = site.params["padding_config"]
    if 0 in x.sizes:
        return [Array(value.tensor, (None,) * len(x.sizes), site.sizes(), value.number)]
    moved = [p for p, each in enumerate(config) if any(each)]
    x = plain(x, site.inputs[0], moved)
    number = value.number if value.number is not None else 0
    tensor = _pad(x.tensor, x, config, moved, number)
    if value.number is None:
        there = ops.full(x.tensor.shape, True, "bool")
        tensor = ops.where(_pad(there, x, config, moved, False), tensor, value.tensor)
    return [replace(x, tensor=tensor, sizes=site.sizes(), number=None)]


def _pad(tensor: Tensor, x: Array, config: Any, moved: Sequence[int], value: Any) -> Tensor:
    for p in moved:
        low, high, interior = config[p]
        tensor = ops.pad(tensor, x.name(p), low, high, value, interior=interior)
    return tensor


def _infer_joined(site: inference.Site, operands: list[Dims]) -> list[Dims]:
    axis, first = site.params["dimension"], operands[0]
    if len(operands) == 1:
        return [first]
    for other in operands[1:]:
        rest = [p for p in range(len(first.nodes)) if p != axis]
        site.match(first.pick(rest), other.pick(rest))
    like = next((x.nodes[axis] for x in operands if not x.weak[axis]), None)
    nodes, weak = _common(operands)
    nodes[axis], weak[axis] = site.new(site.sizes()[axis], like), False
    return [Dims(tuple(nodes), tuple(weak))]


def _common(operands: Sequence[Dims]) -> tuple[list[int], list[bool]]:
    """Returns the positions of several arrays together, and whether each is weak in all."""
    nodes, weak = list(operands[0].nodes), [True] * len(operands[0].nodes)
    for p in range(len(nodes)):
        strong = [x.nodes[p] for x in operands if not x.weak[p]]
        nodes[p], weak[p] = (strong or nodes[p : p + 1])[0], not strong
    return nodes, weak


def _joined(site: conversion.Site, operands: list[Array]) -> list[Array]:
    axis, labels = site.params["dimension"], site.outputs[0]
    operands = [x for x in operands if x.sizes[axis]]
    if len(operands) == 1:
        return operands
    have = [p for p in range(len(labels)) if any(x.places[p] is not None for x in operands)]
    parts = [plain(x, labels, sorted({*have, axis})) for x in operands]
    tensor = ops.concat([x.tensor for x in parts], labels[axis])
    return [replace(parts[0], tensor=tensor, sizes=site.sizes(), number=None)]


def _infer_stack(site: inference.Site, operands: list[Dims]) -> list[Dims]:
    axis, first = site.params["axis"], operands[0]
    for other in operands[1:]:
        site.match(first, other)
    nodes, weak = _common(operands)
    nodes.insert(axis, site.new(len(operands)))
    weak.insert(axis, False)
    return [Dims(tuple(nodes), tuple(weak))]


def _stacked(site: conversion.Site, operands: list[Array]) -> list[Array]:
    axis, labels = site.params["axis"], site.outputs[0]
    rest = (*labels[:axis], *labels[axis + 1 :])
    have = [p for p in range(len(rest)) if any(x.places[p] is not None for x in operands)]
    parts = [plain(x, rest, have) for x in operands]
    tensor = ops.stack([x.tensor for x in parts], labels[axis])
    places = list(parts[0].places)
    places.insert(axis, (labels[axis],))
    return [Array(tensor, tuple(places), site.sizes())]


def _infer_unstack(site: inference.Site, operands: list[Dims]) -> list[Dims]:
    rest = [p for p in range(len(operands[0].nodes)) if p != site.params["axis"]]
    return [operands[0].pick(rest)] * len(site.equation.outvars)


def _unstacked(site: conversion.Site, operands: list[Array]) -> list[Array]:
    axis = site.params["axis"]
    x = single(operands[0], site.inputs[0])
    rest = [p for p in range(len(x.sizes)) if p != axis]
    if x.places[axis] is None:
        return [x.pick(rest)] * x.sizes[axis]
    tensors = [ops.index(x.tensor, x.name(axis), n) for n in range(x.sizes[axis])]
    return [replace(x, tensor=t).pick(rest) for t in tensors]


def _infer_tile(site: inference.Site, operands: list[Dims]) -> list[Dims]:
    own, sizes = site.operand_sizes(), site.sizes()
    (x,), extra = operands, len(sizes) - len(own)
    nodes = [site.new(size) for size in sizes[:extra]]
    weak = [True] * extra
    for p, (old, size) in enumerate(zip(own, sizes[extra:], strict=True)):
        nodes.append(x.nodes[p] if old == size else site.new(size, like=x.nodes[p]))
        weak.append(x.weak[p] or old == 1)
    return [Dims(tuple(nodes), tuple(weak))]


def _tiled(site: conversion.Site, operands: list[Array]) -> list[Array]:
    x, sizes = single(without_ones(operands[0]), site.inputs[0]), site.sizes()
    extra = len(sizes) - len(x.sizes)
    tensor = x.tensor
    for p, (old, size) in enumerate(zip(x.sizes, sizes[extra:], strict=True)):
        if old != size and x.places[p] is not None:
            tensor = ops.concat([tensor] * (size // old), x.name(p))
    return [Array(tensor, ((None,) * extra) + x.places, sizes)]


# Slices whose place is known at run time.


def _start(array: Array) -> Any:
    """Returns where a slice begins: a number if it is known."""
    if array.number is not None:
        return int(array.number)
    return array.tensor if array.tensor.dtype == np.int32 else ops.cast(array.tensor, "int32")


def _dynamic_slice(site: conversion.Site, operands: list[Array]) -> list[Array]:
    x, *starts = operands
    x = single(x, site.inputs[0])
    tensor = x.tensor
    for p, (size, start) in enumerate(zip(site.sizes(), starts, strict=True)):
        if x.places[p] is not None and size != x.sizes[p]:
            tensor = ops.dynamic_slice(tensor, x.name(p), _start(start), size)
    return [replace(x, tensor=tensor, sizes=site.sizes(), number=None)]


def _infer_update(site: inference.Site, operands: list[Dims]) -> list[Dims]:
    x, update = operands[:2]
    sizes, own = site.operand_sizes(0), site.operand_sizes(1)
    for p, (a, b) in enumerate(zip(sizes, own, strict=True)):
        if a == b:
            if x.weak[p] or update.weak[p]:
                site.classes.later(x.nodes[p], update.nodes[p])
            else:
                site.unify(x.nodes[p], update.nodes[p])
    nodes = tuple(
        update.nodes[p] if x.weak[p] and sizes[p] == own[p] else x.nodes[p]
        for p in range(len(sizes))
    )
    return [Dims(nodes, (False,) * len(nodes))]


def _dynamic_update(site: conversion.Site, operands: list[Array]) -> list[Array]:
    x, update, *starts = operands
    labels = site.outputs[0]
    x, update = plain(x, labels), plain(update, labels)
    moved = [p for p in range(len(labels)) if x.sizes[p] != update.sizes[p]]
    where = [(x.name(p), _start(starts[p]), update.sizes[p]) for p in moved]
    tensor = updated(x.tensor, update.tensor, where)
    return [replace(x, tensor=tensor, number=None)]


def updated(x: Tensor, update: Tensor, where: Sequence[tuple[str, Any, int]]) -> Tensor:
    """Returns x with a block replaced, which begins at a place along each of some dims."""
    if not where:
        return update
    (dim, start, size), *rest = where
    if rest:
        update = updated(ops.dynamic_slice(x, dim, start, size), update, rest)
    return ops.dynamic_update_slice(x, update, dim, start)


TABLE: Table = {
    "concatenate": Rule(_infer_joined, _joined),
    "dynamic_slice": Rule(_infer_resized, _dynamic_slice),
    "dynamic_update_slice": Rule(_infer_update, _dynamic_update),
    "pad": Rule(_infer_pad, _padded),
    "slice": Rule(_infer_resized, _sliced),
    "split": Rule(_infer_split, _split),
    "stack": Rule(_infer_stack, _stacked),
    "tile": Rule(_infer_tile, _tiled),
    "unstack": Rule(_infer_unstack, _unstacked),
}
