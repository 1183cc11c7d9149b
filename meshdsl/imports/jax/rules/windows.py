"""Convolutions and pooling."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import meshdsl.ops as ops
from meshdsl.gradients.autodiff import grad
from meshdsl.imports.jax import conversion, inference
from meshdsl.imports.jax.arrays import Array, plain, single
from meshdsl.imports.jax.conversion import Unfit
from meshdsl.imports.jax.inference import Dims
from meshdsl.imports.jax.rules.positions import resized
from meshdsl.imports.jax.rules.rule import Rule, Table
from meshdsl.ops.elementwise.arithmetic import stop_gradient
from meshdsl.tensors.dtypes import is_float
from meshdsl.tensors.tensor import Tensor


def _infer_convolution(site: inference.Site, operands: list[Dims]) -> list[Dims]:
    x, w = operands
    numbers = site.params["dimension_numbers"]
    lhs, rhs, out = numbers.lhs_spec, numbers.rhs_spec, numbers.out_spec
    own, sizes = site.operand_sizes(0), site.sizes()
    if site.params["feature_group_count"] == 1:
        site.classes.contract(x.nodes[lhs[1]], w.nodes[rhs[1]], site.source, site.name)
    nodes = [0] * len(sizes)
    nodes[out[0]] = x.nodes[lhs[0]]
    nodes[out[1]] = w.nodes[rhs[0]]
    if own[lhs[1]] == sizes[out[1]] == site.params["feature_group_count"]:
        site.unify(x.nodes[lhs[1]], w.nodes[rhs[0]])
    for mine, place in zip(lhs[2:], out[2:], strict=True):
        node = x.nodes[mine]
        nodes[place] = node if own[mine] == sizes[place] else site.new(sizes[place], like=node)
    return [Dims(tuple(nodes), (False,) * len(nodes))]


def _convolved(site: conversion.Site, operands: list[Array]) -> list[Array]:
    params = site.params
    if params["batch_group_count"] != 1:
        raise Unfit("with groups of the batch")
    numbers, labels = params["dimension_numbers"], site.outputs[0]
    lhs, rhs, out = numbers.lhs_spec, numbers.rhs_spec, numbers.out_spec
    x_names, w_names = [""] * len(lhs), [""] * len(rhs)
    x_names[lhs[0]] = labels[out[0]]
    w_names[rhs[0]] = labels[out[1]]
    used = set(labels)

    def free(name: str) -> str:
        while name in used:
            name += "_in"
        used.add(name)
        return name

    x_names[lhs[1]] = w_names[rhs[1]] = free(site.inputs[0][lhs[1]])
    for place, window, after in zip(lhs[2:], rhs[2:], out[2:], strict=True):
        x_names[place] = labels[after]
        w_names[window] = free(site.inputs[1][window])
    x, w = plain(operands[0], x_names), plain(operands[1], w_names)
    tensor = x.tensor
    for place, factor in zip(lhs[2:], params["lhs_dilation"], strict=True):
        if factor != 1:
            tensor = ops.pad(tensor, x_names[place], interior=factor - 1)
    spatial = {x_names[p]: w_names[q] for p, q in zip(lhs[2:], rhs[2:], strict=True)}
    dims = [x_names[p] for p in lhs[2:]]
    result = ops.conv(
        tensor,
        w.tensor,
        spatial,
        x_names[lhs[1]],
        labels[out[1]],
        strides=dict(zip(dims, params["window_strides"], strict=True)),
        padding=dict(zip(dims, params["padding"], strict=True)),
        dilation=dict(zip(dims, params["rhs_dilation"], strict=True)),
        groups=params["feature_group_count"],
    )
    return [Array(result, tuple((n,) for n in labels), site.sizes())]


def _pooled(function: Callable[..., Tensor], of_sums: bool) -> Rule:
    def infer(site: inference.Site, operands: list[Dims]) -> list[Dims]:
        return [resized(site, operands[0])]

    def convert(site: conversion.Site, operands: list[Array]) -> list[Array]:
        params, sizes = site.params, site.params["window_dimensions"]
        if any(d != 1 for d in params["base_dilation"]):
            raise Unfit("with a dilated operand")
        if of_sums and not is_float(operands[0].tensor.dtype):
            raise Unfit("of integers")
        moved = [
            p
            for p, size in enumerate(sizes)
            if size != 1 or params["window_strides"][p] != 1 or any(params["padding"][p])
        ]
        x = plain(single(operands[0], site.inputs[0]), site.inputs[0], moved)
        if not moved:
            return [x]

        def by_name(values: object) -> dict:
            return {x.name(p): values[p] for p in moved}  # type: ignore[index]

        extra = {"count_pads": True} if of_sums else {}
        tensor = function(
            x.tensor,
            by_name(sizes),
            by_name(params["window_strides"]),
            by_name([tuple(each) for each in params["padding"]]),
            by_name(params["window_dilation"]),
            **extra,
        )
        if of_sums:
            tensor = tensor * float(math.prod(sizes))
        return [replace(x, tensor=tensor, sizes=site.sizes(), number=None)]

    return Rule(infer, convert)


def _min_pool(x: Tensor, *rest: object) -> Tensor:
    back = ops.negative if is_float(x.dtype) else ops.bit_not  # integers in the reverse order
    return back(ops.max_pool(back(x), *rest))  # type: ignore[arg-type]


def _infer_scattered(site: inference.Site, operands: list[Dims]) -> list[Dims]:
    source, operand = operands
    for place, size in enumerate(site.params["window_dimensions"]):
        if size == 1 and site.operand_sizes(0)[place] == site.operand_sizes(1)[place]:
            site.unify(operand.nodes[place], source.nodes[place])
    return [operand]


def _scattered(site: conversion.Site, operands: list[Array]) -> list[Array]:
    """The gradient of pooling by extremes, in a function that has a gradient in it."""
    params, (source, operand) = site.params, operands
    pool: Callable[..., Tensor] = ops.max_pool if params["select_prim"].name == "ge" else _min_pool
    sizes, strides, padding = (
        params[name] for name in ("window_dimensions", "window_strides", "padding")
    )
    moved = [p for p, n in enumerate(sizes) if n != 1 or strides[p] != 1 or any(padding[p])]
    x = plain(operand, site.outputs[0])
    g = plain(source, site.outputs[0])  # a window has the name of the dim that it moves along

    def pooled(tensor: Tensor) -> Tensor:
        windows = ({x.name(p): each[p] for p in moved} for each in (sizes, strides, padding))
        result = pool(tensor, *windows) if moved else tensor
        return ops.sum(result * stop_gradient(g.tensor))

    return [replace(x, tensor=grad(pooled)(x.tensor), number=None)]


TABLE: Table = {
    "conv_general_dilated": Rule(_infer_convolution, _convolved),
    "reduce_window_max": _pooled(ops.max_pool, False),
    "reduce_window_min": _pooled(_min_pool, False),
    "reduce_window_sum": _pooled(ops.avg_pool, True),
    "select_and_scatter_add": Rule(_infer_scattered, _scattered),
}
