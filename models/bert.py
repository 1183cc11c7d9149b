"""An encoder that fills in masked tokens (Devlin et al. 2019, "BERT").

Of the tokens of a batch, some are chosen to be told from the others; most of these are masked. The
choice is random, yet a function of the tokens, so that the loss needs no key and a step repeated is
the same step.
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
    ACTIVATIONS,
    Block,
    Drawing,
    Norm,
    Shared,
    distance_bias,
    first_positions,
    init_blocks,
    init_distances,
    init_learned,
    init_norm,
    plus,
    rotations_of,
    run_blocks,
    with_routers,
)
from meshdsl.models.model import Model


@dataclass(frozen=True)
class BertConfig(TransformerConfig):
    """A transformer's configuration, with what belongs to masked language models.

    Attributes:
        segments: kinds of segments that a token can be of; 0: none are told apart.
        pooler: whether there are parameters that sum a sequence up in its first state.
        mask_token: what stands for a masked token.
        first_position: the row of the table of positions for the first token; RoBERTa (Liu et al.
            2019) has rows before it, for pads.
        chosen: the share of the tokens that the loss is about. Of these, 80 % are masked, 10 % are
            random tokens and 10 % stay (section 3.1 of the paper).
    """

    segments: int = 2
    pooler: bool = True
    mask_token: int = 103
    first_position: int = 0
    chosen: float = 0.15

    def _misfits(self) -> list[str]:
        problems = super()._misfits()
        if not 0 <= self.mask_token < self.vocab:
            problems.append(f"mask_token={self.mask_token} is not in the vocab={self.vocab}")
        if self.first_position >= self.max_length:
            problems.append(
                f"first_position={self.first_position} leaves none of max_length={self.max_length}"
            )
        if self.dense_layers:
            problems.append(f"dense_layers={self.dense_layers} are for decoder-only models")
        if not 0 < self.chosen <= 1:
            problems.append(f"chosen={self.chosen}: a share, more than 0 and at most 1")
        return problems

    @property
    def may_be_zero(self) -> tuple[str, ...]:
        return (*super().may_be_zero, "segments", "mask_token", "first_position")

    @property
    def longest(self) -> int:
        """The number of positions that have a row, where these are learned."""
        return self.max_length - self.first_position


class Pooler(md.Module):
    """Sums a sequence up: a projection of its first state."""

    weight: md.Tensor  # embed, pooled
    bias: md.Tensor  # pooled

    def __call__(self, states: md.Tensor) -> md.Tensor:
        first = md.index(states, "length", 0)
        return md.tanh(md.einsum(first, self.weight, over="embed") + self.bias)


class MaskedHead(md.Module):
    """Scores of the tokens, but for the table, which is the embedding's."""

    weight: md.Tensor  # embed, transformed
    bias: md.Tensor | None  # transformed
    norm: Norm
    out_bias: md.Tensor  # vocab
    kind: str = md.static()  # of the activation

    def __call__(self, states: md.Tensor, table: md.Tensor) -> md.Tensor:
        h = md.einsum(states, self.weight, over="embed").rename(transformed="embed")
        h = self.norm(ACTIVATIONS[self.kind](plus(h, self.bias)))
        return md.einsum(h, table, over="embed") + self.out_bias


class Bert(md.Module):
    """All parameters; those of `blocks` have the dim `layers` in front."""

    embedding: md.Tensor  # vocab, embed
    positions: md.Tensor | None  # max_length, embed
    distances: md.Tensor | None  # buckets, heads, group
    segments: md.Tensor | None  # segments, embed
    embedding_norm: Norm
    blocks: Block
    pooler: Pooler | None
    head: MaskedHead


def init(config: BertConfig, key: md.Tensor) -> Bert:
    """Returns initial parameters."""
    _, embed, *_, vocab, _ = config.dims
    draw = Drawing(key, 24, config.policy.params)
    segments, pooler = None, None
    if config.segments:
        segments = draw.normal(0.02, [md.Dimension("segments", config.segments), embed])
    if config.pooler:
        pooled = md.Dimension("pooled", config.embed)
        pooler = Pooler(draw.into(embed, [embed, pooled]), draw.zeros([pooled]))
    transformed = md.Dimension("transformed", config.embed)
    return Bert(
        embedding=draw.normal(0.02, [vocab, embed]),
        positions=init_learned(config, draw),
        distances=init_distances(config, draw),
        segments=segments,
        embedding_norm=init_norm(config, draw, [embed]),
        blocks=init_blocks(config, draw),
        pooler=pooler,
        head=MaskedHead(
            weight=draw.into(embed, [embed, transformed]),
            bias=draw.zeros([embed]) if config.bias else None,
            norm=init_norm(config, draw, [embed]),
            out_bias=draw.zeros([vocab]),
            kind="gelu" if config.gated else config.mlp,
        ),
    )


def states(
    config: BertConfig, params: Bert, tokens: md.Tensor, segments: md.Tensor | None = None
) -> tuple[md.Tensor, nn.RouterLosses | None]:
    """Returns what the last block leaves: [batch, length, embed], and router losses.

    Args:
        segments: integers [batch, length], all 0 by default.

    Raises:
        ValueError: `tokens` are longer than the learned positions.
    """
    policy = config.policy
    length = tokens.shape.get("length")
    x = md.take(params.embedding, tokens, "vocab")
    if params.positions is not None:
        x = x + first_positions(params.positions, length, config.first_position)
    if params.segments is not None:
        kinds = md.zeros([], "int32") if segments is None else segments
        x = x + md.take(params.segments, kinds, "segments")
    x = policy.to_compute(params.embedding_norm)(policy.to_compute(x))
    bias = distance_bias(config, params.distances, length, causal=False)
    shared = Shared(causal=False, bias=bias, **rotations_of(config, length))
    return run_blocks(config, params.blocks, x, shared)


def logits(
    config: BertConfig, params: Bert, tokens: md.Tensor, segments: md.Tensor | None = None
) -> md.Tensor:
    """Returns the scores of the token at each position: [batch, length, vocab]; see `states`."""
    return _scores(config, params, states(config, params, tokens, segments)[0])


def _scores(config: BertConfig, params: Bert, x: md.Tensor) -> md.Tensor:
    head, table = config.policy.to_compute((params.head, params.embedding))
    return config.policy.to_output(head(x, table))


def corrupt(config: BertConfig, tokens: md.Tensor) -> tuple[md.Tensor, md.Tensor]:
    """Returns tokens of which some are masked or exchanged, and where the loss is about them."""
    where, how, what = md.random.split(_key_of(tokens), 3)
    dims = tokens.shape
    chosen = md.random.bernoulli(where, config.chosen, dims)
    share = md.random.uniform(how, dims)
    other = md.cast(md.random.uniform(what, dims) * config.vocab, tokens.dtype)
    put = md.where(share < 0.8, config.mask_token, md.where(share < 0.9, other, tokens))
    return md.where(chosen, put, tokens), chosen


def _key_of(tokens: md.Tensor) -> md.Tensor:
    """Returns a random key that depends on every token and its place."""
    place = md.cast(md.arange(tokens.shape.get("length")), "uint32") * 2654435761 + 1
    total = md.sum(md.cast(tokens, "uint32") * place)
    return md.random.key(0) + total


def loss(
    config: BertConfig, params: Bert, batch: Mapping[str, Any]
) -> md.Tensor | tuple[md.Tensor, dict[str, md.Tensor]]:
    """Returns the mean negative log-likelihood of the chosen tokens, in nats; targets have no say.

    With a mixture of experts, the losses of the routers are added; see `with_routers`.
    """
    tokens = batch["tokens"]
    given, chosen = corrupt(config, tokens)
    x, losses = states(config, params, given)
    each = nn.softmax_cross_entropy(_scores(config, params, x), tokens, over="vocab")
    return with_routers(config, nn.mean_where(each, chosen), [losses])


def bert(name: str, config: BertConfig, batch_size: int, length: int) -> Model:
    """Returns the model of a configuration; its default length is at most its learned positions.

    Raises:
        ValueError: the configuration has `router_bias`.
    """
    if config.router_bias:
        raise ValueError("router_bias is for decoder-only models")
    return Model(
        name=name,
        init=partial(init, config),
        loss=partial(loss, config),
        batch_size=batch_size,
        length=min(length, config.longest) if config.positions == "learned" else length,
        config=config,
        rebuild=lambda config: bert(name, config, batch_size, length),
    )
