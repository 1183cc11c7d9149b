"""An encoder-decoder (Raffel et al. 2020, "T5").

The two stacks have blocks of one configuration; those of the decoder also attend to what the
encoder leaves. With positions="relative", each stack has one table of buckets for all its layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import meshdsl as md
from meshdsl import nn
from meshdsl.models.configs import TransformerConfig
from meshdsl.models.layers import (
    Block,
    Drawing,
    LayerCache,
    Norm,
    Shared,
    apart,
    distance_bias,
    empty_cache,
    empty_caches,
    init_blocks,
    init_distances,
    init_learned,
    init_norm,
    joined_caches,
    layers_of,
    learned_positions,
    rotations_of,
    run_blocks,
    step_apart,
    step_blocks,
    undropping,
    unrolls,
    with_routers,
)
from meshdsl.models.model import Cache, Decoding, Model
from meshdsl.tensors.dims import Dimension


@dataclass(frozen=True)
class T5Config(TransformerConfig):
    """A transformer's configuration, of both the encoder and the decoder.

    Attributes:
        decoder_start: the token that the decoder begins a text with, after the encoder has read all
            of the prompt. None: it begins with the last token of the prompt.
    """

    decoder_start: int | None = None

    @property
    def may_be_zero(self) -> tuple[str, ...]:
        return (*super().may_be_zero, "decoder_start")

    def _misfits(self) -> list[str]:
        problems = super()._misfits()
        if self.decoder_start is not None and self.decoder_start >= self.vocab:
            problems.append(f"decoder_start={self.decoder_start} is no token: vocab={self.vocab}")
        return problems


class Stack(md.Module):
    """Blocks, with the dim `layers` in front, what tells them positions, and a norm."""

    positions: md.Tensor | None  # max_length, embed
    distances: md.Tensor | None  # buckets, heads, group
    blocks: Block
    final_norm: Norm | None

    def __call__(
        self,
        config: TransformerConfig,
        x: md.Tensor,
        causal: bool,
        memory: md.Tensor | None = None,
        pads: md.Tensor | None = None,
    ) -> tuple[md.Tensor, nn.RouterLosses | None]:
        """Returns the stream [batch, length, embed] after all blocks, and router losses.

        Args:
            pads: s32[batch]; positions at the start of each row that others do not see.
        """
        length, policy = x.shape.get("length"), config.policy
        places, segments = None, None
        if pads is not None:
            places = md.outer(md.subtract, md.arange(length), pads)  # batch, length
            segments = md.cast(places >= 0, "int32")
        if self.positions is not None:
            x = x + learned_positions(self.positions, length, places)
        shared = Shared(
            causal=causal,
            bias=distance_bias(config, self.distances, length, causal),
            memory=memory,
            segments=segments,
            **rotations_of(config, length, places),
        )
        x, losses = run_blocks(config, self.blocks, policy.to_compute(x), shared)
        return self._normed(config, x), losses

    def step(
        self, config: TransformerConfig, x: md.Tensor, cache: Cache, unrolled: bool
    ) -> tuple[md.Tensor, Cache]:
        """Returns the stream of new positions, and the cache with them."""
        assert cache.memory is not None and cache.memory_pads is not None
        length, ((name, own),) = x.shape.get("length"), cache.layers.items()
        memory = next(iter(cache.memory.values())).shape.get("memory_length")
        slots = cache.slots(length)
        if self.positions is not None:
            x = x + md.take(self.positions, slots.text_positions, "max_length")
        shared = Shared(
            causal=True,
            bias=distance_bias(config, self.distances, length, causal=True, slots=slots),
            slots=slots,
            memory_mask=md.outer(md.greater_equal, md.arange(memory), cache.memory_pads),
            **rotations_of(config, length, slots.text_positions, slots.reach),
        )
        x = config.policy.to_compute(x)
        step = step_apart if unrolled else step_blocks
        x, own = step(config, self.blocks, x, shared, own, cache.memory)
        return self._normed(config, x), cache.after(slots, {name: own})

    def _normed(self, config: TransformerConfig, x: md.Tensor) -> md.Tensor:
        return x if self.final_norm is None else config.policy.to_compute(self.final_norm)(x)


class T5(md.Module):
    """All parameters."""

    embedding: md.Tensor  # vocab, embed
    encoder: Stack
    decoder: Stack
    unembedding: md.Tensor | None  # embed, vocab


def init(config: TransformerConfig, key: md.Tensor) -> T5:
    """Returns initial parameters."""
    _, embed, *_, vocab, _ = config.dims
    draw = Drawing(key, 48, config.policy.params)
    return T5(
        embedding=draw.normal(1.0, [vocab, embed]),
        encoder=_init_stack(config, draw, cross=False),
        decoder=_init_stack(config, draw, cross=True),
        unembedding=None if config.tied else draw.into(embed, [embed, vocab]),
    )


def _init_stack(config: TransformerConfig, draw: Drawing, cross: bool) -> Stack:
    return Stack(
        positions=init_learned(config, draw),
        distances=init_distances(config, draw),
        blocks=init_blocks(config, draw, cross),
        final_norm=init_norm(config, draw, [config.dims[1]])
        if config.norm_order != "post"
        else None,
    )


def states(
    config: TransformerConfig, params: T5, source: md.Tensor, tokens: md.Tensor
) -> tuple[md.Tensor, md.Tensor, list[nn.RouterLosses]]:
    """Returns what encoder and decoder leave, both [batch, length, embed], and router losses.

    Args:
        source: what the encoder reads: integers [batch, length]; its length is its own.
        tokens: what the decoder reads, each the one before that to be told.
    """
    x = md.take(params.embedding, source, "vocab")
    encoded, first = params.encoder(config, x, causal=False)
    y = md.take(params.embedding, tokens, "vocab")
    memory = encoded.rename(length="memory_length")
    decoded, second = params.decoder(config, y, causal=True, memory=memory)
    return encoded, decoded, [losses for losses in (first, second) if losses is not None]


def logits(
    config: TransformerConfig, params: T5, source: md.Tensor, tokens: md.Tensor
) -> md.Tensor:
    """Returns the scores of the token after each of `tokens`: [batch, length, vocab]."""
    return _scores(config, params, states(config, params, source, tokens)[1])


def encode(
    config: TransformerConfig,
    params: T5,
    source: md.Tensor,
    pads: md.Tensor,
    positions: int,
    unrolled: bool = False,
) -> Cache:
    """Returns the cache of a decoder that has read nothing, with what the encoder leaves.

    Args:
        source: what the encoder reads: integers [batch, length].
        pads: s32[batch]; positions at the start of each row of `source` that are pads.
        positions: how many the decoder is to keep, `memory_length`.
        unrolled: as for `decode_step`.
    """
    batch = source.shape.get("batch")
    x = md.take(params.embedding, source, "vocab")
    blocks = params.encoder.blocks
    encoder = params.encoder.replace(blocks=blocks.replace(mlp=undropping(blocks.mlp)))
    encoded, _ = encoder(config, x, causal=False, pads=pads)
    encoded = encoded.rename(length="memory_length")

    def of_memory(block: Block) -> LayerCache:
        assert block.cross is not None
        return config.policy.to_compute(block.cross).of_memory(encoded)

    layers, blocks = config.dims[0], params.decoder.blocks
    slots = [batch, Dimension("memory_length", positions)]
    if unrolled:
        own = empty_caches(config, layers.size, slots)
        memory = joined_caches([of_memory(block) for block in layers_of(blocks)])
    else:
        own = empty_cache(config, [layers, *slots])
        _, memory = md.scan(
            lambda _, block: (None, of_memory(block)), None, blocks, dim=layers.name
        )
    start = md.zeros([], "int32")
    return Cache(start, md.zeros([batch], "int32"), {"decoder": own}, memory, pads)


def decode_step(
    config: TransformerConfig,
    params: T5,
    tokens: md.Tensor,
    cache: Cache,
    every: bool = False,
    unrolled: bool = False,
) -> tuple[md.Tensor, Cache]:
    """Returns the scores of the token after `tokens`, and the cache with these.

    See `transformer.decode_step`.
    """
    x = md.take(params.embedding, tokens, "vocab")
    x, cache = params.decoder.step(config, x, cache, unrolled)
    if not every:
        x = md.index(x, "length", tokens.shape.get("length").size - 1)
    return _scores(config, params, x), cache


def _scores(config: TransformerConfig, params: T5, x: md.Tensor) -> md.Tensor:
    return config.policy.to_output(md.einsum(x, _table(config, params), over="embed"))


def _table(config: TransformerConfig, params: T5) -> md.Tensor:
    """Returns what makes the scores: [vocab, embed], in any order."""
    if params.unembedding is not None:
        return config.policy.to_compute(params.unembedding)
    # The table's rows have variance 1: without the factor, tied scores would begin far too large.
    return config.policy.to_compute(params.embedding) * config.embed**-0.5


def prepared(config: TransformerConfig, params: T5, unrolled: bool = False) -> T5:
    """Returns parameters for decoding; see `transformer.prepared`."""
    encoder, decoder = (
        each.replace(blocks=config.policy.to_compute(each.blocks))
        for each in (params.encoder, params.decoder)
    )
    if unrolled:  # the encoder reads a prompt once: a loop is fast enough
        decoder = decoder.replace(blocks=apart(decoder.blocks))
    return params.replace(encoder=encoder, decoder=decoder, unembedding=_table(config, params))


def loss(
    config: TransformerConfig, params: T5, batch: Mapping[str, Any]
) -> md.Tensor | tuple[md.Tensor, dict[str, md.Tensor]]:
    """Returns the mean negative log-likelihood of the second half of each text, given the first.

    This is the prefix language model of section 3.2.3 of the paper, on batches of plain text.
    With a mixture of experts, the losses of the routers are added; see `with_routers`.
    """
    half = batch["tokens"].shape.get("length").size // 2
    source = md.slice(batch["tokens"], "length", 0, half)
    tokens, targets = (md.slice(batch[name], "length", half) for name in ("tokens", "targets"))
    _, x, losses = states(config, params, source, tokens)
    value = md.mean(nn.softmax_cross_entropy(_scores(config, params, x), targets, over="vocab"))
    return with_routers(config, value, losses)


def t5(name: str, config: T5Config, batch_size: int, length: int) -> Model:
    """Returns the model of a configuration; each stack gets half of the `length` tokens.

    Raises:
        ValueError: the configuration has `dense_layers` or `router_bias`.
    """
    if config.dense_layers:
        raise ValueError(f"dense_layers={config.dense_layers} are for decoder-only models")
    if config.router_bias:
        raise ValueError("router_bias is for decoder-only models")
    return Model(
        name=name,
        init=partial(init, config),
        loss=partial(loss, config),
        batch_size=batch_size,
        length=min(length, 2 * config.max_length) if config.positions == "learned" else length,
        config=config,
        decoding=_decoding(config),
        rebuild=lambda config: t5(name, config, batch_size, length),
    )


def _decoding(config: T5Config, unrolled: bool = False) -> Decoding:
    return Decoding(
        step=partial(decode_step, config, unrolled=unrolled),
        encode=partial(encode, config, unrolled=unrolled),
        prepare=partial(prepared, config, unrolled=unrolled),
        start=config.decoder_start,
        max_length=config.max_length if config.positions == "learned" else None,
        window=config.common_window,
        paged=True,
        unrolled=_decoding(config, True) if unrolls(config) and not unrolled else None,
    )
