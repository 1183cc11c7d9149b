"""Blocks, and stacks of them along the dim `layers`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

import meshdsl as md
from meshdsl import nn
from meshdsl.models.configs import TransformerConfig
from meshdsl.models.layers.attention import (
    Attention,
    LatentAttention,
    LayerCache,
    Shared,
    init_attention,
    init_multihead,
)
from meshdsl.models.layers.drawing import Drawing
from meshdsl.models.layers.low_rank import resolved
from meshdsl.models.layers.mlp import MLP, Experts, init_mlp, undropping
from meshdsl.models.layers.norm import Norm, init_norm
from meshdsl.models.remat import rematerialised
from meshdsl.ops.literal import literal


class Block(md.Module):
    """One layer: each part reads the stream and adds to it.

    A part reads what its norm makes of the stream, or, with `post_norm`, the norm comes after the
    sum. `attention_added_norm` and its like normalise what a part adds, besides. The parts for
    cross-attention are those of a decoder that has an encoder.
    """

    attention_norm: Norm
    attention: Attention | LatentAttention
    cross_norm: Norm | None
    cross: Attention | None
    mlp_norm: Norm
    mlp: MLP | Experts
    attention_added_norm: Norm | None
    cross_added_norm: Norm | None
    mlp_added_norm: Norm | None
    post_norm: bool = md.static()

    def __call__(self, x: md.Tensor, shared: Shared) -> tuple[md.Tensor, nn.RouterLosses | None]:
        """Returns the stream and, of a mixture of experts, the losses of its router."""
        y = md.name(self.attention(self._read(self.attention_norm, x), shared), "attention_added")
        x = self._added(self.attention_norm, x, y, self.attention_added_norm)
        if self.cross is not None and self.cross_norm is not None:
            assert shared.memory is not None
            y = self.cross.across(self._read(self.cross_norm, x), shared.memory)
            y = md.name(y, "attention_added")
            x = self._added(self.cross_norm, x, y, self.cross_added_norm)
        return self._mixed(x)

    def step(
        self, x: md.Tensor, shared: Shared, cache: LayerCache, memory: LayerCache | None = None
    ) -> tuple[md.Tensor, LayerCache]:
        """Returns the stream of new positions, and the layer's cache with them.

        Experts drop no tokens: which ones they would drop depends on those that come later.

        Args:
            cache: as for `step` of the attention.
            memory: for a layer with cross-attention, `of_memory` of what it reads.
        """
        y, cache = self.attention.step(self._read(self.attention_norm, x), shared, cache)
        x = self._added(self.attention_norm, x, y, self.attention_added_norm)
        if self.cross is not None and self.cross_norm is not None:
            assert memory is not None
            h = self._read(self.cross_norm, x)
            y = self.cross.across_cached(h, memory, shared.memory_mask)
            x = self._added(self.cross_norm, x, y, self.cross_added_norm)
        return replace(self, mlp=undropping(self.mlp))._mixed(x)[0], cache

    def _mixed(self, x: md.Tensor) -> tuple[md.Tensor, nn.RouterLosses | None]:
        """Returns the stream after the MLP or the experts, and the losses of their router."""
        h, losses = self._read(self.mlp_norm, x), None
        if isinstance(self.mlp, Experts):
            y, losses = self.mlp(h)
        else:
            y = self.mlp(h)
        y = md.name(y, "mlp_added")
        return self._added(self.mlp_norm, x, y, self.mlp_added_norm), losses

    def _read(self, norm: Norm, x: md.Tensor) -> md.Tensor:
        return x if self.post_norm else norm(x)

    def _added(self, norm: Norm, x: md.Tensor, y: md.Tensor, added: Norm | None) -> md.Tensor:
        y = y if added is None else added(y)
        stream = x + y
        return norm(stream) if self.post_norm else stream


def init_blocks(
    config: TransformerConfig, draw: Drawing, cross: bool = False, dense: bool = False
) -> Block:
    """Returns the blocks of a stack, whose parameters have the dim `layers` in front.

    Args:
        dense: whether these are the first `dense_layers`, or all others.
    """
    layers, embed, *_ = config.dims
    layers = md.Dimension(
        "layers", config.dense_layers if dense else layers.size - config.dense_layers
    )

    both = config.norm_order == "both"

    def norm() -> Norm:
        return init_norm(config, draw, [layers, embed])

    return Block(
        attention_norm=norm(),
        attention=init_attention(config, draw, [layers]),
        cross_norm=norm() if cross else None,
        cross=init_multihead(config, draw, [layers]) if cross else None,
        mlp_norm=norm(),
        mlp=init_mlp(config, draw, [layers], dense),
        attention_added_norm=norm() if both else None,
        cross_added_norm=norm() if both and cross else None,
        mlp_added_norm=norm() if both else None,
        post_norm=config.norm_order == "post",
    )


def run_blocks(
    config: TransformerConfig, blocks: Block, x: md.Tensor, shared: Shared
) -> tuple[md.Tensor, nn.RouterLosses | None]:
    """Returns the stream after all blocks, and what their routers add: mean losses, all tokens."""

    def block(
        x: md.Tensor, layer: tuple[Block, md.Tensor | None]
    ) -> tuple[md.Tensor, nn.RouterLosses | None]:
        params, windowed = layer
        own = resolved(config.policy.to_compute(params))
        return own(x, replace(shared, windowed=windowed))

    layers = (blocks, _windowed(config))
    x, losses = md.scan(rematerialised(block, config.remat), x, layers, dim="layers")
    if losses is None:
        return x, None
    return x, nn.RouterLosses(
        balance=md.mean(losses.balance, "layers"),
        z=md.mean(losses.z, "layers"),
        tokens=losses.tokens,
        dropped=None if losses.dropped is None else md.mean(losses.dropped, "layers"),
    )


def step_blocks(
    config: TransformerConfig,
    blocks: Block,
    x: md.Tensor,
    shared: Shared,
    cache: LayerCache,
    memory: LayerCache | None = None,
) -> tuple[md.Tensor, LayerCache]:
    """Returns the stream of new positions after all blocks, and their caches with these.

    Args:
        cache, memory: as for `Block.step`, with the dim `layers` in front.
    """

    def block(
        x: md.Tensor, layer: tuple[Block, LayerCache, LayerCache | None, md.Tensor | None]
    ) -> tuple[md.Tensor, LayerCache]:
        params, cache, memory, windowed = layer
        own = replace(shared, windowed=windowed)
        return config.policy.to_compute(params).step(x, own, cache, memory)

    return md.scan(block, x, (blocks, cache, memory, _windowed(config)), dim="layers")


def _windowed(config: TransformerConfig) -> md.Tensor | None:
    """Returns whether each layer has the window, bool [layers]; None if all are alike."""
    if not config.windowed:
        return None
    flags = md.named(np.array(config.windowed), ["layers"])
    return literal(flags)


def with_routers(
    config: TransformerConfig, value: md.Tensor, losses: Sequence[nn.RouterLosses | None]
) -> md.Tensor | tuple[md.Tensor, dict[str, md.Tensor]]:
    """Returns the loss of training with what the routers of some stacks of blocks add to it.

    With `report_dropped`, it is a pair of the loss and the metric `dropped_choices`.
    """
    routers = [one for one in losses if one is not None]
    for one in routers:
        value = value + config.balance_weight * one.balance + config.router_z_weight * one.z
    dropped = [one.dropped for one in routers if one.dropped is not None]
    if not dropped:
        return value
    return value, {"dropped_choices": sum(dropped[1:], dropped[0]) / len(dropped)}


def balanced(blocks: Block, tokens: md.Tensor) -> Block:
    """Returns blocks whose routers' biases are balanced, by the tokens that chose each expert."""
    mlp = blocks.mlp
    assert isinstance(mlp, Experts) and mlp.bias is not None
    return replace(blocks, mlp=replace(mlp, bias=nn.balance_bias(mlp.bias, tokens, over="routed")))
