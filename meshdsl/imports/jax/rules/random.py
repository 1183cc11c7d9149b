"""Random numbers: JAX's own bits, from the same counters (Threefry-2x32, partitionable).

A key has no position of its own in JAX: its two words are the tensor's dim `random_key`, which
stands at no position.
"""

from __future__ import annotations

import jax
import numpy as np

import meshdsl.ops as ops
from meshdsl.imports.jax import conversion, inference
from meshdsl.imports.jax.arrays import Array, plain
from meshdsl.imports.jax.conversion import Unfit
from meshdsl.imports.jax.inference import Dims
from meshdsl.imports.jax.rules.rule import Rule, Table
from meshdsl.ops.random_keys import FOLD_IN, KEY, words
from meshdsl.ops.random_keys import RANDOM_BITS as BITS
from meshdsl.tensors.dims import Dimension, Shape
from meshdsl.tensors.tensor import Tensor
from meshdsl.tracing.trace import bind_one


def _key(x: Array) -> Tensor:
    """Returns one key, as the language has it."""
    if not jax.config.values["jax_threefry_partitionable"]:
        raise Unfit("needs jax_threefry_partitionable=True, JAX's default")
    if any(size != 1 for size in x.sizes):
        raise Unfit("of several keys at once, as under jax.vmap")
    tensor = x.tensor
    for names in x.places:
        for name in names or ():
            tensor = ops.index(tensor, name, 0)
    return tensor


def _infer_new(site: inference.Site, operands: list[Dims]) -> list[Dims]:
    return [site.fresh(site.sizes())]


def _infer_wrap(site: inference.Site, operands: list[Dims]) -> list[Dims]:
    return [operands[0].pick(range(len(operands[0].nodes) - 1))]


def _infer_unwrap(site: inference.Site, operands: list[Dims]) -> list[Dims]:
    words = site.new(2, hint=KEY.name)
    return [Dims((*operands[0].nodes, words), (*operands[0].weak, False))]


def _infer_same(site: inference.Site, operands: list[Dims]) -> list[Dims]:
    return operands[:1]


def _wrapped(site: conversion.Site, operands: list[Array]) -> list[Array]:
    last = len(operands[0].sizes) - 1
    labels = (*site.outputs[0], KEY.name)
    x = plain(operands[0], labels, [last])
    return [Array(x.tensor, x.places[:last], x.sizes[:last])]


def _unwrapped(site: conversion.Site, operands: list[Array]) -> list[Array]:
    (x,) = operands
    return [Array(x.tensor, (*x.places, (KEY.name,)), (*x.sizes, 2))]


def _seeded(site: conversion.Site, operands: list[Array]) -> list[Array]:
    (seed,) = operands
    if seed.sizes:
        raise Unfit("of several seeds at once, as under jax.vmap")
    if seed.number is not None:
        low = ops.full([], int(seed.number) % 2**32, "uint32")
    else:
        low = ops.cast(seed.tensor, "uint32")
    tensor = ops.stack([ops.full([], 0, "uint32"), low], KEY)
    return [Array(tensor, (), ())]


def _folded(site: conversion.Site, operands: list[Array]) -> list[Array]:
    key, number = _key(operands[0]), operands[1]
    tensor = bind_one(FOLD_IN, (key, ops.cast(number.tensor, "uint32")), {"high": 0})
    return [Array(tensor, number.places, number.sizes)]


def _split(site: conversion.Site, operands: list[Array]) -> list[Array]:
    shape = Shape(Dimension(n, s) for n, s in zip(site.outputs[0], site.sizes(), strict=True))
    params = {"shape": shape, "pairs": True, "start": 0}
    tensor = bind_one(BITS, (_key(operands[0]),), params)
    return [Array.of(tensor, [KEY.name])]


def _bits(site: conversion.Site, operands: list[Array]) -> list[Array]:
    width = site.params["bit_width"]
    shape = Shape(Dimension(n, s) for n, s in zip(site.outputs[0], site.sizes(), strict=True))
    pair = words(_key(operands[0]), shape)
    high, low = ops.index(pair, KEY, 0), ops.index(pair, KEY, 1)
    if width == 64:
        wide = ops.shift_left(ops.cast(high, "uint64"), 32)
        return [Array.of(ops.bit_or(wide, ops.cast(low, "uint64")))]
    bits = ops.bit_xor(high, low)
    if width < 32:
        bits = ops.cast(ops.bit_and(bits, 2**width - 1), np.dtype(f"uint{width}"))
    return [Array.of(bits)]


def _same(site: conversion.Site, operands: list[Array]) -> list[Array]:
    return operands[:1]


TABLE: Table = {
    "random_bits": Rule(_infer_new, _bits),
    "random_clone": Rule(_infer_same, _same),
    "random_fold_in": Rule(lambda site, operands: operands[1:], _folded),
    "random_seed": Rule(_infer_same, _seeded),
    "random_split": Rule(_infer_new, _split),
    "random_unwrap": Rule(_infer_unwrap, _unwrapped),
    "random_wrap": Rule(_infer_wrap, _wrapped),
}
