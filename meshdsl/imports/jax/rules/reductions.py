"""Reductions, and what runs along one position: cumulative operations, sorting, extremes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import meshdsl.ops as ops
from meshdsl.imports.jax import conversion, inference
from meshdsl.imports.jax.arrays import Array, plain, single
from meshdsl.imports.jax.conversion import Unfit
from meshdsl.imports.jax.functions import integer_power
from meshdsl.imports.jax.inference import Dims
from meshdsl.imports.jax.rules.elementwise import together
from meshdsl.imports.jax.rules.rule import Rule, Table
from meshdsl.ops.elementwise.arithmetic import stop_gradient
from meshdsl.tensors.dtypes import is_float
from meshdsl.tensors.tensor import Tensor

_OF_BOOL = {ops.max: ops.any, ops.min: ops.all}


def _infer_reduced(site: inference.Site, operands: list[Dims]) -> list[Dims]:
    remaining = [p for p in range(len(operands[0].nodes)) if p not in site.params["axes"]]
    return [operands[0].pick(remaining)]


def reduced(function: Callable[..., Tensor], repeats: str = "") -> Rule:
    """Returns the rule of a reduction.

    Args:
        repeats: what several equal elements do to the result: "times", "power" or nothing.
    """

    def convert(site: conversion.Site, operands: list[Array]) -> list[Array]:
        x, over = operands[0], set(site.params["axes"])
        if function in (ops.all, ops.any) and x.tensor.dtype != bool:
            raise Unfit("of the bits of integers")
        of = _OF_BOOL.get(function, function) if x.tensor.dtype == bool else function
        names = [name for p in sorted(over) for name in x.places[p] or ()]
        tensor = of(x.tensor, names) if names else x.tensor
        alike = math.prod(x.sizes[p] for p in over if x.places[p] is None)
        if repeats == "times" and alike != 1:
            tensor = tensor * alike
        if repeats == "power" and alike != 1:
            exact = not is_float(tensor.dtype)
            tensor = integer_power(tensor, alike) if exact else ops.power(tensor, float(alike))
        rest = [p for p in range(len(x.sizes)) if p not in over]
        places = tuple(x.places[p] for p in rest)
        return [Array(tensor, places, tuple(x.sizes[p] for p in rest))]

    return Rule(_infer_reduced, convert)


def mapped(function: Callable[..., Tensor], repeats: str = "") -> Rule:
    """Returns the rule of a collective of JAX over positions, as there are after `jax.vmap`.

    `jax.lax.pmean(x, "batch")` inside of `jax.vmap(..., axis_name="batch")` is one.
    """
    one = reduced(function, repeats)

    def infer(site: inference.Site, operands: list[Dims]) -> list[Dims]:
        return [dims for x in operands for dims in one.infer(site, [x])]

    def convert(site: conversion.Site, operands: list[Array]) -> list[Array]:
        return [array for x in operands for array in one.convert(site, [x])]

    return Rule(infer, convert)


def _arg(function: Callable[..., Tensor]) -> Rule:
    def convert(site: conversion.Site, operands: list[Array]) -> list[Array]:
        (axis,) = site.params["axes"]
        x = plain(operands[0], site.inputs[0], [axis])
        tensor = ops.cast(function(x.tensor, x.name(axis)), site.dtype())
        places = tuple(q for p, q in enumerate(x.places) if p != axis)
        return [Array(tensor, places, site.sizes())]

    return Rule(_infer_reduced, convert)


def _same(site: inference.Site, operands: list[Dims]) -> list[Dims]:
    return list(operands)


def cumulative(function: Callable[..., Tensor]) -> Rule:
    """Returns the rule of an operation along one position, forward or backward."""

    def convert(site: conversion.Site, operands: list[Array]) -> list[Array]:
        axis = site.params["axis"]
        x = plain(operands[0], site.inputs[0], [axis])
        tensor = function(x.tensor, x.name(axis), site.params["reverse"])
        return [replace(x, tensor=tensor, number=None)]

    return Rule(_same, convert)


def _cumulative_logsumexp(x: Tensor, dim: str, reverse: bool) -> Tensor:
    """Sums along a dim in units of the largest element so far, so that none is lost."""
    highest, before = (
        stop_gradient(ops.cummax(x, dim, reverse, exclusive)) for exclusive in (False, True)
    )
    unit = ops.where(ops.isfinite(highest), highest, 0)
    decay = ops.exp(before - unit)  # from the unit before to this one
    return ops.log(ops.linear_recurrence(decay, ops.exp(x - unit), dim, reverse)) + unit


# Sorting.


def _sorted(site: conversion.Site, operands: list[Array]) -> list[Array]:
    axis, keys = site.params["dimension"], site.params["num_keys"]
    arrays = [plain(x, site.inputs[0], None if len(operands) > 1 else [axis]) for x in operands]
    dim = arrays[0].name(axis)
    if len(arrays) == 1:
        return [replace(arrays[0], tensor=ops.sort(arrays[0].tensor, dim))]
    if keys != 1:
        raise Unfit("by several keys")
    order = ops.argsort(arrays[0].tensor, dim)
    rest = [replace(x, tensor=ops.take_along(x.tensor, order, dim)) for x in arrays[1:]]
    return [replace(arrays[0], tensor=ops.sort(arrays[0].tensor, dim)), *rest]


def _infer_top_k(site: inference.Site, operands: list[Dims]) -> list[Dims]:
    (x,) = operands
    axis = site.params.get("axis", -1) % len(x.nodes)
    chosen = site.new(site.sizes()[axis], hint="choice")
    nodes = tuple(chosen if p == axis else n for p, n in enumerate(x.nodes))
    return [Dims(nodes, x.weak)] * 2


def _top_k(site: conversion.Site, operands: list[Array]) -> list[Array]:
    axis = site.params.get("axis", -1) % len(operands[0].sizes)
    x = plain(operands[0], site.inputs[0], [axis])
    into = site.outputs[0][axis]
    values, indices = ops.top_k(x.tensor, site.params["k"], x.name(axis), into)
    places = tuple((into,) if p == axis else q for p, q in enumerate(x.places))
    return [Array(tensor, places, site.sizes()) for tensor in (values, indices)]


def _reversed(site: conversion.Site, operands: list[Array]) -> list[Array]:
    x, over = single(operands[0], site.inputs[0]), site.params["dimensions"]
    names = [x.name(p) for p in over if x.places[p] is not None]
    return [replace(x, tensor=ops.flip(x.tensor, names) if names else x.tensor)]


TABLE: Table = {
    "argmax": _arg(ops.argmax),
    "argmin": _arg(ops.argmin),
    "cumlogsumexp": cumulative(_cumulative_logsumexp),
    "cummax": cumulative(ops.cummax),
    "cummin": cumulative(ops.cummin),
    "cumprod": cumulative(ops.cumprod),
    "cumsum": cumulative(ops.cumsum),
    "pmax": mapped(ops.max),
    "pmin": mapped(ops.min),
    "psum": mapped(ops.sum, "times"),
    "reduce_and": reduced(ops.all),
    "reduce_max": reduced(ops.max),
    "reduce_min": reduced(ops.min),
    "reduce_or": reduced(ops.any),
    "reduce_prod": reduced(ops.prod, "power"),
    "reduce_sum": reduced(ops.sum, "times"),
    "rev": Rule(_same, _reversed),
    "sort": Rule(together, _sorted),
    "top_k": Rule(_infer_top_k, _top_k),
}
