"""Elementwise primitives: positions pair up, one of them may be broadcast."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import ml_dtypes
import numpy as np

import meshdsl.ops as ops
from meshdsl.imports.jax import conversion, inference
from meshdsl.imports.jax.arrays import Array, aligned
from meshdsl.imports.jax.classes import base_of
from meshdsl.imports.jax.conversion import Unfit
from meshdsl.imports.jax.functions import FUNCTIONS, integer_power
from meshdsl.imports.jax.inference import Dims
from meshdsl.imports.jax.rules.rule import Rule, Table
from meshdsl.ops.elementwise.arithmetic import stop_gradient
from meshdsl.tensors.tensor import Tensor


def together(site: inference.Site, operands: list[Dims]) -> list[Dims]:
    """Pairs positions up; those of scalars and of size one are broadcast."""
    sizes = site.sizes()
    full = [
        (dims, site.operand_sizes(n))
        for n, dims in enumerate(operands)
        if len(dims.nodes) == len(sizes)
    ]
    nodes, weak = [], []
    for place, size in enumerate(sizes):
        having = [(d.nodes[place], d.weak[place]) for d, own in full if own[place] == size]
        strong = [node for node, is_weak in having if not is_weak] or [having[0][0]]
        best = max(strong, key=lambda node: _known(site, node))
        for node in strong:
            site.unify(best, node)
        for node, is_weak in having:
            if is_weak:
                site.classes.later(best, node)
        nodes.append(best)
        weak.append(all(is_weak for _, is_weak in having))
    return [Dims(tuple(nodes), tuple(weak))] * len(site.equation.outvars)


def _known(site: inference.Site, node: int) -> tuple[bool, bool, int]:
    """Orders classes by how much is known of them."""
    facts = site.classes.facts(node)
    first = facts.said is not None and base_of(facts.said.name) == facts.said.name
    return facts.said is not None, first, len(facts.arrays)


def same(site: inference.Site, operands: list[Dims]) -> list[Dims]:
    """Gives results the dims of the operands, one by one."""
    return operands[: len(site.equation.outvars)]


def elementwise(function: Callable[..., Tensor]) -> Rule:
    """Returns the rule of a function of the elements."""

    def convert(site: conversion.Site, operands: list[Array]) -> list[Array]:
        return [_applied(function, operands, site.outputs[0])]

    return Rule(together, convert)


def _applied(
    function: Callable[..., Any], operands: Sequence[Array], labels: Sequence[str]
) -> Array:
    tensors, result = aligned(operands, labels)
    return replace(result, tensor=function(*tensors), number=None)


def with_params(function: Callable[..., Tensor]) -> Rule:
    """Returns the rule of a function of (params, *elements)."""

    def convert(site: conversion.Site, operands: list[Array]) -> list[Array]:
        def applied(*tensors: Tensor) -> Tensor:
            return function(site.params, *tensors)

        return [_applied(applied, operands, site.outputs[0])]

    return Rule(together, convert)


def _converted(params: Mapping[str, Any], x: Tensor) -> Tensor:
    dtype = np.dtype(params["new_dtype"])
    if dtype == np.bool_ and x.dtype != np.bool_:
        return ops.not_equal(x, 0)
    return ops.cast(x, dtype)


def _cast_number(site: conversion.Site, operands: list[Array]) -> list[Array]:
    (x,) = operands
    if x.number is not None and np.dtype(site.params["new_dtype"]) != np.bool_:
        number = np.asarray(x.number).astype(site.params["new_dtype"])[()]
        return [Array.filled(number, site.dtype(), x.sizes)]
    return [replace(x, tensor=_converted(site.params, x.tensor), number=None)]


def _bits_as(params: Mapping[str, Any], x: Tensor) -> Tensor:
    """Returns the bits of numbers as another dtype of that width, device by device."""
    dtype = np.dtype(params["new_dtype"])
    if dtype.itemsize != x.dtype.itemsize:
        raise Unfit(f"from {x.dtype.name} to {dtype.name}, of another width")

    return ops.local(
        _Bits(dtype), x, out=x.shape, dtype=dtype, split=x.shape, gradient=None, name="bitcast"
    )


# Functions of arrays as classes: equal ones compare as equal, so that programs are shared.


@dataclass(frozen=True)
class _Bits:
    """Reads bits as another dtype."""

    dtype: np.dtype

    def __call__(self, x: Any) -> Any:
        return jax.lax.bitcast_convert_type(x, self.dtype)


@dataclass(frozen=True)
class _Fewer:
    """Rounds numbers to so many bits, and keeps their dtype."""

    exponent: int
    mantissa: int

    def __call__(self, x: Any) -> Any:
        return jax.lax.reduce_precision(x, self.exponent, self.mantissa)


def _in_fewer_bits(params: Mapping[str, Any], x: Tensor) -> Tensor:
    own, fewer = ml_dtypes.finfo(x.dtype), _Fewer(params["exponent_bits"], params["mantissa_bits"])
    if fewer.exponent >= own.nexp and fewer.mantissa >= own.nmant:
        return x
    return ops.local(fewer, x, out=x.shape, split=x.shape, name="reduce_precision")


def _rounded(params: Mapping[str, Any], x: Tensor) -> Tensor:
    if int(params["rounding_method"]) == 1:
        return ops.round(x)
    size = ops.abs(x)
    whole = ops.floor(size)  # size + 0.5 would be rounded itself
    return ops.sign(x) * (whole + ops.cast(ops.greater_equal(size - whole, 0.5), x.dtype))


def _logical_shift(x: Tensor, y: Tensor) -> Tensor:
    if x.dtype.kind != "u":
        unsigned = np.dtype(f"uint{8 * x.dtype.itemsize}")
        bits = _bits_as({"new_dtype": unsigned}, x)
        moved = ops.shift_right(bits, ops.cast(y, unsigned))
        return _bits_as({"new_dtype": x.dtype}, moved)
    return ops.shift_right(x, y)


def _stopped(site: conversion.Site, operands: list[Array]) -> list[Array]:
    return [replace(x, tensor=stop_gradient(x.tensor)) for x in operands]


def _same(site: conversion.Site, operands: list[Array]) -> list[Array]:
    return list(operands)


TABLE: Table = {
    **{name: elementwise(function) for name, function in FUNCTIONS.items()},
    "shift_right_logical": elementwise(_logical_shift),
    "bitcast_convert_type": with_params(_bits_as),
    "convert_element_type": Rule(same, _cast_number),
    "copy": Rule(same, _same),
    "copy_p": Rule(same, _same),
    "device_put": Rule(same, _same),
    "integer_pow": with_params(lambda params, x: integer_power(x, params["y"])),
    "optimization_barrier": Rule(same, _same),
    "reduce_precision": with_params(_in_fewer_bits),
    "round": with_params(_rounded),
    "sharding_constraint": Rule(same, _same),
    "stop_gradient": Rule(same, _stopped),
}
