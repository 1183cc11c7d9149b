"""Random numbers: JAX's own bits, from the same counters (Threefry-2x32, partitionable).

A key has no position of its own in JAX: its two words are the tensor's dim `random_key`, which
stands at no position.
"""

from __future__ import annotations

import math
from dataclasses import replace

import jax
import numpy as np

import meshdsl.ops as ops
from meshdsl.imports.jax import conversion, inference
from meshdsl.imports.jax.arrays import Array, plain, stretched
from meshdsl.imports.jax.conversion import Unfit
from meshdsl.imports.jax.inference import Dims
from meshdsl.imports.jax.keys import key_dtype
from meshdsl.imports.jax.rules.elementwise import together
from meshdsl.imports.jax.rules.rule import Rule, Table
from meshdsl.ops.random_keys import FOLD_IN, KEY, words
from meshdsl.tensors.dims import RAW_KEY, Dimension, Shape
from meshdsl.tensors.tensor import Tensor
from meshdsl.tracing.trace import bind_one


def _drawn(site: conversion.Site, keys: Array) -> Tensor:
    """Returns two words for each element of a result, [*keys' positions, *drawn, random_key]."""
    if not jax.config.values["jax_threefry_partitionable"]:
        raise Unfit("needs jax_threefry_partitionable=True, JAX's default")
    labels = site.outputs[0]
    shape = Shape(Dimension(n, s) for n, s in zip(labels, site.sizes(), strict=True))
    count = len(keys.sizes)
    if math.prod(keys.sizes) == 1:
        return words(_one(keys), shape)
    # One draw has one key. Several keys, as under jax.vmap, are folded with the positions instead:
    # both encrypt a counter by a key.
    drawn = list(shape)[count:]
    if math.prod(dim.size for dim in drawn) > 2**32:
        raise Unfit("of more than 2**32 numbers for each of several keys")
    number = ops.full([], 0, "uint32")
    for dim in drawn:
        number = number * dim.size + ops.cast(ops.arange(dim), "uint32")
    number = ops.broadcast(number, shape)
    return bind_one(FOLD_IN, (plain(keys, labels[:count]).tensor, number), {"high": 0})


def _one(keys: Array) -> Tensor:
    """Returns a single key, without positions."""
    tensor = keys.tensor
    for names in keys.places:
        for name in names or ():
            tensor = ops.index(tensor, name, 0)
    return tensor


def _infer_drawn(site: inference.Site, operands: list[Dims]) -> list[Dims]:
    (keys,) = operands
    count = len(keys.nodes)
    new = site.fresh(site.sizes()[count:])
    return [Dims((*keys.nodes, *new.nodes), (False,) * len(site.sizes()))]


def _say_raw(site: inference.Site, words: int) -> None:
    """Names the words of a raw key, so that microbatches can tell that it is one."""
    site.classes.say_last(words, RAW_KEY.name, "the words of a raw key")


def _infer_wrap(site: inference.Site, operands: list[Dims]) -> list[Dims]:
    *rest, words = operands[0].nodes
    _say_raw(site, words)
    return [operands[0].pick(range(len(rest)))]


def _infer_unwrap(site: inference.Site, operands: list[Dims]) -> list[Dims]:
    words = site.new(2)
    _say_raw(site, words)
    return [Dims((*operands[0].nodes, words), (*operands[0].weak, False))]


def _infer_same(site: inference.Site, operands: list[Dims]) -> list[Dims]:
    return operands[:1]


def _need_known(site: conversion.Site) -> None:
    """Raises Unfit for keys of another kind, whose numbers are others."""
    kind = site.equation.outvars[0].aval.dtype
    if kind != key_dtype():
        raise Unfit(f"of keys of the kind {kind}; make them with impl='threefry2x32'")


def _wrapped(site: conversion.Site, operands: list[Array]) -> list[Array]:
    _need_known(site)
    last = len(operands[0].sizes) - 1
    labels = (*site.outputs[0], KEY.name)
    x = plain(operands[0], labels, [last])
    return [Array(x.tensor, x.places[:last], x.sizes[:last])]


def _unwrapped(site: conversion.Site, operands: list[Array]) -> list[Array]:
    (x,) = operands
    return [Array(x.tensor, (*x.places, (KEY.name,)), (*x.sizes, 2))]


def _seeded(site: conversion.Site, operands: list[Array]) -> list[Array]:
    _need_known(site)
    (seed,) = operands
    is_wide = site.equation.invars[0].aval.dtype.itemsize == 8  # has a high word
    if seed.number is not None:
        number = int(seed.number)
        low = ops.full([], number % 2**32, "uint32")
        high = ops.full([], (number >> 32) % 2**32 if is_wide else 0, "uint32")
    else:
        low = ops.cast(seed.tensor, "uint32")
        wide = ops.shift_right(seed.tensor, 32) if is_wide else ops.zeros(low.shape, "uint32")
        high = ops.cast(wide, "uint32")
    tensor = ops.stack([high, low], KEY)
    return [replace(seed, tensor=ops.transpose(tensor, [*low.shape, KEY]), number=None)]


def _folded(site: conversion.Site, operands: list[Array]) -> list[Array]:
    keys, number = operands
    if math.prod(keys.sizes) == 1 and len(number.sizes) >= len(keys.sizes):
        tensor = bind_one(FOLD_IN, (_one(keys), ops.cast(number.tensor, "uint32")), {"high": 0})
        return [Array(tensor, number.places, number.sizes)]
    sizes, labels = site.sizes(), site.outputs[0]
    keys = plain(stretched(keys, sizes), labels)
    if not number.sizes:
        number = Array(number.tensor, (None,) * len(sizes), sizes)
    low = ops.cast(plain(stretched(number, sizes), labels).tensor, "uint32")
    tensor = bind_one(FOLD_IN, (keys.tensor, low), {"high": 0})
    return [Array(tensor, tuple((name,) for name in labels), sizes)]


def _split(site: conversion.Site, operands: list[Array]) -> list[Array]:
    return [Array.of(_drawn(site, operands[0]), [KEY.name])]


def _bits(site: conversion.Site, operands: list[Array]) -> list[Array]:
    width = site.params["bit_width"]
    pair = _drawn(site, operands[0])
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
    "random_bits": Rule(_infer_drawn, _bits),
    "random_clone": Rule(_infer_same, _same),
    "random_fold_in": Rule(together, _folded),
    "random_seed": Rule(_infer_same, _seeded),
    "random_split": Rule(_infer_drawn, _split),
    "random_unwrap": Rule(_infer_unwrap, _unwrapped),
    "random_wrap": Rule(_infer_wrap, _wrapped),
}
