"""A decoder-only transformer: language models from GPT-2 to mixtures of experts.

The kinds of parts in `TransformerConfig` make it GPT-2 and GPT-3 (layer norm, learned positions,
GELU), LLaMA (RMS norm, rotary positions, gated SiLU, grouped-query attention), Mixtral (experts),
DeepSeek-V2 (latent attention, its router), and what lies between. Parameters are kept in the
policy's `params` dtype and cast where they are used, one block at a time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import meshdsl as md
from meshdsl import nn
from meshdsl.models.configs import TransformerConfig
from meshdsl.models.layers import (
    Block,
    Drawing,
    Norm,
    Shared,
    apart,
    balanced,
    distance_bias,
    empty_cache,
    empty_caches,
    init_blocks,
    init_distances,
    init_learned,
    init_norm,
    learned_positions,
    rotations_of,
    run_blocks,
    step_apart,
    step_blocks,
    unrolls,
    with_routers,
)
from meshdsl.models.model import Cache, Decoding, Model
from meshdsl.tensors.dims import Dimension


class Transformer(md.Module):
    """All parameters; those of `blocks` have the dim `layers` in front."""

    embedding: md.Tensor  # vocab, embed
    positions: md.Tensor | None  # max_length, embed
    distances: md.Tensor | None  # buckets, heads, group
    dense_blocks: Block | None  # those before, where `blocks` have experts
    blocks: Block
    final_norm: Norm | None
    unembedding: md.Tensor | None  # embed, vocab


def init(config: TransformerConfig, key: md.Tensor) -> Transformer:
    """Returns initial parameters.

    Projections keep the variance of what they are given, embeddings have standard deviation 0.02,
    and what is added to the residual stream is divided by sqrt(2 layers) (Radford et al. 2019,
    "Language models are unsupervised multitask learners", section 2.3).
    """
    _, embed, *_, vocab, _ = config.dims
    draw = Drawing(key, 40, config.policy.params)
    blocks = init_blocks(config, draw)
    return Transformer(
        embedding=draw.normal(0.02, [vocab, embed]),
        positions=init_learned(config, draw),
        distances=init_distances(config, draw),
        blocks=blocks,
        final_norm=init_norm(config, draw, [embed]) if config.norm_order != "post" else None,
        unembedding=None if config.tied else draw.into(embed, [embed, vocab]),
        dense_blocks=init_blocks(config, draw, dense=True) if config.dense_layers else None,
    )


def states(
    config: TransformerConfig,
    params: Transformer,
    tokens: md.Tensor,
    segments: md.Tensor | None = None,
    positions: md.Tensor | None = None,
) -> tuple[md.Tensor, nn.RouterLosses | None]:
    """Returns what the last block leaves, normalised: [batch, length, embed], and router losses.

    Args:
        segments: integers [batch, length]; a token sees those of its own segment only.
        positions: integers [batch, length], 0, 1, ... along `length` by default. Only learned
            positions need them: the other kinds tell distances, the same in a segment.

    Raises:
        ValueError: `tokens` are longer than the learned positions.
    """
    policy = config.policy
    length = tokens.shape.get("length")
    # The look-up comes before the cast, so that the table's gradient is summed in full precision.
    x = _scaled(config, md.take(params.embedding, tokens, "vocab"))
    if params.positions is not None:
        x = x + learned_positions(params.positions, length, positions)
    bias = distance_bias(config, params.distances, length, causal=True)
    rotations = rotations_of(config, length)
    shared = Shared(causal=True, bias=bias, segments=segments, **rotations)
    x = policy.to_compute(x)
    if params.dense_blocks is not None:
        x, _ = run_blocks(config, params.dense_blocks, x, shared)
    x, losses = run_blocks(config, params.blocks, x, shared)
    if params.final_norm is not None:
        x = policy.to_compute(params.final_norm)(x)
    return x, losses


def logits(config: TransformerConfig, params: Transformer, tokens: md.Tensor) -> md.Tensor:
    """Returns the scores of the next token: [batch, length, vocab]; errors as in `states`."""
    return _scores(config, params, states(config, params, tokens)[0])


def prepared(config: TransformerConfig, params: Transformer, unrolled: bool = False) -> Transformer:
    """Returns parameters for decoding, in the dtype that steps compute in.

    Tables that are looked up stay as they are, since they are read before the cast. A step reads
    all of the table that makes the scores: an embedding that does both has a copy for these.

    Args:
        unrolled: whether the layers are `apart`.
    """
    policy, cast = config.policy, config.policy.to_compute

    def of_steps(blocks: Block) -> Block:
        return apart(cast(blocks)) if unrolled else cast(blocks)

    scores = params.unembedding
    if scores is None and policy.compute != params.embedding.dtype:
        scores = params.embedding
    return replace(
        params,
        blocks=of_steps(params.blocks),
        dense_blocks=None if params.dense_blocks is None else of_steps(params.dense_blocks),
        final_norm=None if params.final_norm is None else cast(params.final_norm),
        unembedding=None if scores is None else cast(scores),
    )


def new_cache(
    config: TransformerConfig, pads: md.Tensor, positions: int, unrolled: bool = False
) -> Cache:
    """Returns the cache of texts of which nothing has been read.

    Args:
        pads: s32[batch].
        positions: how many of a text are kept, `memory_length`; see `nn.slots_needed`.
        unrolled: as for `decode_step`.
    """
    slots = [pads.shape.get("batch"), Dimension("memory_length", positions)]
    stacks = {
        name: empty_caches(config, layers, slots)
        if unrolled
        else empty_cache(config, [Dimension("layers", layers), *slots])
        for name, layers in _stacks(config).items()
    }
    return Cache(md.zeros([], "int32"), pads, stacks)


def _stacks(config: TransformerConfig) -> dict[str, int]:
    """Returns the number of layers of each stack."""
    stacks = {"dense_blocks": config.dense_layers, "blocks": config.layers - config.dense_layers}
    return {name: layers for name, layers in stacks.items() if layers}


def decode_step(
    config: TransformerConfig,
    params: Transformer,
    tokens: md.Tensor,
    cache: Cache,
    every: bool = False,
    unrolled: bool = False,
) -> tuple[md.Tensor, Cache]:
    """Returns the scores of the token after `tokens`, [batch, vocab], and the cache with these.

    Step by step, texts get the scores of `logits` for all of their tokens at once, where no experts
    drop tokens.

    Args:
        tokens: [batch, length]; one token of each text, or many at once. See `nn.Slots` for what
            fits a cache that is shorter than the text.
        every: whether to return the scores after each of the tokens, [batch, length, vocab].
        unrolled: whether the layers of parameters and cache are `apart`.
    """
    length, policy = tokens.shape.get("length"), config.policy
    slots = cache.slots(length)
    x = _scaled(config, md.take(params.embedding, tokens, "vocab"))
    if params.positions is not None:
        x = x + md.take(params.positions, slots.text_positions, "max_length")
    shared = Shared(
        causal=True,
        bias=distance_bias(config, params.distances, length, causal=True, slots=slots),
        slots=slots,
        **rotations_of(config, length, slots.text_positions, slots.reach),
    )
    x, stacks = policy.to_compute(x), {}
    step = step_apart if unrolled else step_blocks
    for name in _stacks(config):
        x, stacks[name] = step(config, getattr(params, name), x, shared, cache.layers[name])
    if not every:
        x = md.index(x, "length", length.size - 1)
    if params.final_norm is not None:
        x = policy.to_compute(params.final_norm)(x)
    scores = _scores(config, params, x)
    return scores, cache.after(slots, stacks)


def _scores(config: TransformerConfig, params: Transformer, x: md.Tensor) -> md.Tensor:
    table = params.embedding if params.unembedding is None else params.unembedding
    policy, cap = config.policy, config.logit_soft_cap
    scores = policy.to_output(md.einsum(x, policy.to_compute(table), over="embed"))
    return scores if cap is None else cap * md.tanh(scores / cap)


def _scaled(config: TransformerConfig, x: md.Tensor) -> md.Tensor:
    return x * math.sqrt(config.embed) if config.scaled_embedding else x


def loss(
    config: TransformerConfig, params: Transformer, batch: Mapping[str, Any]
) -> md.Tensor | tuple[md.Tensor, dict[str, md.Tensor]]:
    """Returns the mean negative log-likelihood of the targets, in nats per token.

    With a mixture of experts, the losses of the routers are added; see `with_routers`. Of packed
    documents (see `packed_batch`), the mean is over the tokens there are, and with `learned` over
    those that are learned. With `router_bias`,
    `update` needs the tokens that chose each expert beside the loss: `tokens`, [layers, routed].
    """
    segments, learned = batch.get("segments"), batch.get("learned")
    x, losses = states(config, params, batch["tokens"], segments, batch.get("positions"))
    scores = _scores(config, params, x)
    each = nn.softmax_cross_entropy(scores, batch["targets"], over="vocab")
    counts = segments
    if learned is not None:
        counts = learned if segments is None else md.minimum(segments, learned)
    value = md.mean(each) if counts is None else nn.mean_where(each, counts > 0)
    result = with_routers(config, value, [losses])
    if losses is None or losses.tokens is None:
        return result
    value, metrics = result if isinstance(result, tuple) else (result, {})
    return value, {**metrics, "tokens": losses.tokens}


def update(params: Transformer, added: Mapping[str, md.Tensor]) -> Transformer:
    """Returns the parameters with their routers' biases balanced, after a step of the optimizer."""
    return replace(params, blocks=balanced(params.blocks, added["tokens"]))


def transformer(name: str, config: TransformerConfig, batch_size: int, length: int) -> Model:
    """Returns the model of a configuration; its default length is at most its learned positions."""
    return Model(
        name=name,
        init=partial(init, config),
        loss=partial(loss, config),
        update=update if config.experts and config.router_bias else None,
        batch_size=batch_size,
        length=min(length, config.max_length) if config.positions == "learned" else length,
        packed=True,
        masked=True,
        config=config,
        decoding=_decoding(config),
        rebuild=lambda config: transformer(name, config, batch_size, length),
    )


def _decoding(config: TransformerConfig, unrolled: bool = False) -> Decoding:
    return Decoding(
        step=partial(decode_step, config, unrolled=unrolled),
        empty=partial(new_cache, config, unrolled=unrolled),
        prepare=partial(prepared, config, unrolled=unrolled),
        max_length=config.max_length if config.positions == "learned" else None,
        window=config.common_window,
        paged=True,
        unrolled=_decoding(config, True) if unrolls(config) and not unrolled else None,
    )
