"""Layers one by one, for steps of decoding: each has weights and a cache of its own.

A step is short, and a loop over stacks copies the weights of each layer out of them. Here this is
done once, before the first step. The program grows with the layers, so deep models keep the loop.

Invariants:
    A tensor's path is that of its stack with the layer's number at its end, so that the scopes of a
    layout's rules fit both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import jax

import meshdsl as md
from meshdsl.models.configs import TransformerConfig
from meshdsl.models.layers.attention import LayerCache, Shared, empty_cache
from meshdsl.models.layers.block import Block
from meshdsl.tensors.dims import Dimension

MOST_LAYERS = 48  # each adds a few tenths of a second to what steps take to compile


def unrolls(config: TransformerConfig) -> bool:
    """Whether a model of a configuration has few enough layers."""
    return config.layers <= MOST_LAYERS


def apart(blocks: Block) -> Block:
    """Returns blocks with a tuple in the place of each stack: a tensor for each layer."""
    return jax.tree.map(lambda stack: tuple(md.unstack(stack, "layers")), blocks)


def joined_caches(caches: Sequence[LayerCache]) -> LayerCache:
    """Returns one cache of those of all layers: `keys/0` is the first one's of `keys`."""
    return {
        f"{name}/{number}": tensor
        for number, cache in enumerate(caches)
        for name, tensor in cache.items()
    }


def empty_caches(config: TransformerConfig, layers: int, front: Sequence[Dimension]) -> LayerCache:
    """Returns zeros for the `cache` of `step_apart`; see `empty_cache`."""
    return joined_caches([empty_cache(config, front) for _ in range(layers)])


def step_apart(
    config: TransformerConfig,
    blocks: Block,
    x: md.Tensor,
    shared: Shared,
    cache: LayerCache,
    memory: LayerCache | None = None,
) -> tuple[md.Tensor, LayerCache]:
    """Returns the stream of new positions after all blocks, and their caches with these.

    Args:
        blocks: `apart`.
        cache, memory: as for `Block.step`, `joined_caches` of all layers.
    """
    caches = []
    for number, block in enumerate(layers_of(blocks)):
        windowed = config.windowed[number] if config.windowed else None
        own = replace(shared, windowed=windowed)
        read = None if memory is None else _cache_of(memory, number)
        x, after = config.policy.to_compute(block).step(x, own, _cache_of(cache, number), read)
        caches.append(after)
    return x, joined_caches(caches)


def layers_of(blocks: Block) -> list[Block]:
    """Returns each layer of blocks that are `apart`."""
    stacks, tree = jax.tree.flatten(blocks, is_leaf=lambda node: isinstance(node, tuple))
    return [jax.tree.unflatten(tree, layer) for layer in zip(*stacks, strict=True)]


def _cache_of(cache: LayerCache, number: int) -> LayerCache:
    return {
        name.rpartition("/")[0]: tensor
        for name, tensor in cache.items()
        if name.rpartition("/")[2] == str(number)
    }
