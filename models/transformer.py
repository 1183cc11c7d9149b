"""A decoder-only transformer with pre-norm blocks, stacked along the dim `layers`.

The variants of `TransformerConfig` are GPT-2 and GPT-3 (layer norm, learned positions, GELU), LLaMA
(RMS norm, rotary positions, gated SiLU, grouped-query attention), and what lies between. Parameters
are kept in the policy's `params` dtype and cast where they are used, one block at a time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import meshdsl as md
from meshdsl import nn
from meshdsl.models.configs import TransformerConfig
from meshdsl.models.model import Model
from meshdsl.nn import initializers


class Norm(md.Module):
    """RMS norm, or with `centred`, layer norm."""

    scale: md.Tensor  # embed
    bias: md.Tensor | None  # embed
    centred: bool = md.static()

    def __call__(self, x: md.Tensor) -> md.Tensor:
        if self.centred:
            return nn.layer_norm(x, "embed", self.scale, self.bias)
        return nn.rms_norm(x, "embed", self.scale)


class Attention(md.Module):
    """Causal self-attention; the dim `group` is there with grouped queries only."""

    query: md.Tensor  # embed, heads, group, kv
    key: md.Tensor  # embed, heads, kv
    value: md.Tensor  # embed, heads, kv
    out: md.Tensor  # heads, group, kv, embed
    query_bias: md.Tensor | None
    key_bias: md.Tensor | None
    value_bias: md.Tensor | None
    out_bias: md.Tensor | None

    def __call__(self, x: md.Tensor, rotation: nn.Rotation | None) -> md.Tensor:
        q = plus(md.einsum(x, self.query, over="embed"), self.query_bias)
        k = plus(md.einsum(x, self.key, over="embed"), self.key_bias)
        v = plus(md.einsum(x, self.value, over="embed"), self.value_bias)
        if rotation is not None:
            q, k = rotation(q), rotation(k)
        k, v = k.rename(length="memory_length"), v.rename(length="memory_length")
        mixed = nn.attention(q, k, v, over="memory_length", causal=True)
        heads = self.out.shape.without(["embed"])
        return plus(md.einsum(mixed, self.out, over=heads), self.out_bias)


class MLP(md.Module):
    """Two projections with a GELU between, or with `w_gate`, a gated SiLU."""

    w_in: md.Tensor  # embed, d_ff
    w_gate: md.Tensor | None  # embed, d_ff
    w_out: md.Tensor  # d_ff, embed
    bias_in: md.Tensor | None
    bias_out: md.Tensor | None

    def __call__(self, x: md.Tensor) -> md.Tensor:
        if self.w_gate is not None:
            return nn.gated_mlp(x, self.w_gate, self.w_in, self.w_out)
        return nn.mlp(x, self.w_in, self.w_out, self.bias_in, self.bias_out)


class Block(md.Module):
    """One layer: each half reads the normalised stream and adds to it."""

    attention_norm: Norm
    attention: Attention
    mlp_norm: Norm
    mlp: MLP

    def __call__(self, x: md.Tensor, rotation: nn.Rotation | None) -> md.Tensor:
        x = x + self.attention(self.attention_norm(x), rotation)
        return x + self.mlp(self.mlp_norm(x))


class Transformer(md.Module):
    """All parameters; those of `blocks` have the dim `layers` in front."""

    embedding: md.Tensor  # vocab, embed
    positions: md.Tensor | None  # max_length, embed
    blocks: Block
    final_norm: Norm
    unembedding: md.Tensor | None  # embed, vocab


def plus(x: md.Tensor, bias: md.Tensor | None) -> md.Tensor:
    """Returns x + bias, or x where there is no bias."""
    return x if bias is None else x + bias


def init(config: TransformerConfig, key: md.Tensor) -> Transformer:
    """Returns initial parameters.

    Projections keep the variance of what they are given, embeddings have standard deviation 0.02,
    and what is added to the residual stream is divided by sqrt(2 layers) (Radford et al. 2019,
    "Language models are unsupervised multitask learners", section 2.3).
    """
    layers, embed, heads, kv, d_ff, vocab, max_length = config.dims
    group, dtype, bias = config.group_dims, config.policy.params, config.bias
    layer_norm, gated = config.norm == "layer", config.activation == "gated_silu"
    keys = iter(md.random.split(key, 10))
    lookup = initializers.normal(0.02)
    into = initializers.fan_in(over=embed)
    quieter = 1 / math.sqrt(2 * layers.size)

    def zeros(*dims: md.Dimension) -> md.Tensor | None:
        return md.zeros(dims, dtype) if bias else None

    def norm(*dims: md.Dimension) -> Norm:
        return Norm(md.ones(dims, dtype), zeros(*dims) if layer_norm else None, layer_norm)

    attention = Attention(
        query=into(next(keys), [layers, embed, heads, *group, kv], dtype),
        key=into(next(keys), [layers, embed, heads, kv], dtype),
        value=into(next(keys), [layers, embed, heads, kv], dtype),
        out=initializers.fan_in([heads, *group, kv], quieter)(
            next(keys), [layers, heads, *group, kv, embed], dtype
        ),
        query_bias=zeros(layers, heads, *group, kv),
        key_bias=zeros(layers, heads, kv),
        value_bias=zeros(layers, heads, kv),
        out_bias=zeros(layers, embed),
    )
    mlp = MLP(
        w_in=into(next(keys), [layers, embed, d_ff], dtype),
        w_gate=into(next(keys), [layers, embed, d_ff], dtype) if gated else None,
        w_out=initializers.fan_in(d_ff, quieter)(next(keys), [layers, d_ff, embed], dtype),
        bias_in=None if gated else zeros(layers, d_ff),
        bias_out=None if gated else zeros(layers, embed),
    )
    return Transformer(
        embedding=lookup(next(keys), [vocab, embed], dtype),
        positions=lookup(next(keys), [max_length, embed], dtype)
        if config.positions == "learned"
        else None,
        blocks=Block(norm(layers, embed), attention, norm(layers, embed), mlp),
        final_norm=norm(embed),
        unembedding=None if config.tied else into(next(keys), [embed, vocab], dtype),
    )


def logits(config: TransformerConfig, params: Transformer, tokens: md.Tensor) -> md.Tensor:
    """Returns the scores of the next token: [batch, length, vocab].

    Raises:
        ValueError: `tokens` are longer than the learned positions.
    """
    policy = config.policy
    length = tokens.shape.get("length")
    # The look-up comes before the cast, so that the table's gradient is summed in full precision.
    x = md.take(params.embedding, tokens, "vocab")
    if params.positions is not None:
        x = x + _first(params.positions, length)
    x = policy.to_compute(x)
    rotation = None
    if config.positions == "rotary":
        rotation = nn.rotation(length, md.Dimension("kv", config.kv_size), config.rotary_base)

    def apply(x: md.Tensor, block: Block) -> md.Tensor:
        return policy.to_compute(block)(x, rotation)

    step = md.checkpoint(apply) if config.remat == "full" else apply
    x, _ = md.scan(lambda x, block: (step(x, block), None), x, params.blocks, dim="layers")
    x = policy.to_compute(params.final_norm)(x)
    table = params.embedding if params.unembedding is None else params.unembedding
    return policy.to_output(md.einsum(x, policy.to_compute(table), over="embed"))


def _first(positions: md.Tensor, length: md.Dimension) -> md.Tensor:
    """Returns the embeddings of the first positions."""
    limit = positions.shape.get("max_length").size
    if length.size > limit:
        raise ValueError(
            f"length={length.size} is more than the max_length={limit} learned positions; "
            f"use a shorter length, or a model with max_length={length.size}"
        )
    if length.size == limit:
        return positions.rename(max_length=length.name)
    return md.take(positions, md.arange(length), "max_length")


def loss(config: TransformerConfig, params: Transformer, batch: Mapping[str, Any]) -> md.Tensor:
    """Returns the mean negative log-likelihood of the targets, in nats per token."""
    scores = logits(config, params, batch["tokens"])
    return md.mean(nn.softmax_cross_entropy(scores, batch["targets"], over="vocab"))


def transformer(name: str, config: TransformerConfig, batch_size: int, length: int) -> Model:
    """Returns the model of a configuration; its default length is at most its learned positions."""
    return Model(
        name=name,
        init=partial(init, config),
        loss=partial(loss, config),
        batch_size=batch_size,
        length=length if config.positions == "rotary" else min(length, config.max_length),
        config=config,
        rebuild=lambda config: transformer(name, config, batch_size, length),
    )
