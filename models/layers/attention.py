"""Attention of two kinds: multi-head (and grouped-query), and latent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import meshdsl as md
from meshdsl import nn
from meshdsl.models.configs import TransformerConfig
from meshdsl.models.layers.drawing import Drawing, plus
from meshdsl.models.layers.norm import Norm, init_norm
from meshdsl.tensors.dims import Dimension

LayerCache: TypeAlias = Mapping[str, md.Tensor]  # what a layer keeps of earlier positions, by name


@dataclass(frozen=True)
class Shared:
    """What all layers of a stack are given alike.

    Attributes:
        causal: hides later positions from earlier ones.
        rotation: turns queries and keys by their positions.
        window_rotation: does so instead in layers with the window; None: `rotation` does.
        bias: is added to the scores: [heads, group, length, memory_length].
        memory: what cross-attention reads: [batch, memory_length, embed].
        segments: integers [batch, length]; self-attention stays in one.
        slots: where the tokens of a step stand in the caches of the layers.
        memory_mask: bool [batch, memory_length]: what cross-attention sees of `memory`.
        windowed: whether the layer at hand has the window: a bool, or a tensor without dims in a
            loop over layers. None: all have it.
    """

    causal: bool
    rotation: nn.Rotation | None = None
    window_rotation: nn.Rotation | None = None
    bias: md.Tensor | None = None
    memory: md.Tensor | None = None
    segments: md.Tensor | None = None
    slots: nn.Slots | None = None
    memory_mask: md.Tensor | None = None
    windowed: md.Tensor | bool | None = None

    @property
    def own_rotation(self) -> nn.Rotation | None:
        """What turns the queries and keys of the layer at hand."""
        usual, other = self.rotation, self.window_rotation
        if usual is None or other is None:
            return usual
        if self.windowed is None or self.windowed is True:
            return other
        if self.windowed is False:
            return usual
        cos = md.where(self.windowed, other.cos, usual.cos)
        sin = md.where(self.windowed, other.sin, usual.sin)
        return nn.Rotation(cos, sin, usual.over)


class Attention(md.Module):
    """Multi-head attention; the dim `group` is there with grouped queries only."""

    query: md.Tensor  # embed, heads, group, kv
    key: md.Tensor  # embed, heads, kv
    value: md.Tensor  # embed, heads, kv
    out: md.Tensor  # heads, group, kv, embed
    query_bias: md.Tensor | None
    key_bias: md.Tensor | None
    value_bias: md.Tensor | None
    out_bias: md.Tensor | None
    query_norm: Norm | None  # kv
    key_norm: Norm | None  # kv
    scale: float | None = md.static()
    soft_cap: float | None = md.static()
    window: int | None = md.static()

    def __call__(self, x: md.Tensor, shared: Shared) -> md.Tensor:
        """Returns attention among the positions of x: [batch, length, embed]."""
        q, k, v = self._rotated(x, shared)
        k, v = k.rename(length="memory_length"), v.rename(length="memory_length")
        return self._added(
            self._attended(
                q,
                k,
                v,
                shared,
                causal=shared.causal,
                segments=shared.segments,
                bias=shared.bias,
            )
        )

    def step(self, x: md.Tensor, shared: Shared, cache: LayerCache) -> tuple[md.Tensor, LayerCache]:
        """Returns attention of new positions to all that a cache holds, and the cache with them.

        Args:
            cache: `keys` and `values`, both [batch, memory_length, heads, kv].
        """
        assert shared.slots is not None
        q, k, v = self._rotated(x, shared)
        keys, values = shared.slots.write(cache["keys"], k), shared.slots.write(cache["values"], v)
        mixed = self._attended(
            q,
            keys,
            values,
            shared,
            causal=True,
            bias=shared.bias,
            **shared.slots.visible,
        )
        return self._added(mixed), {"keys": keys, "values": values}

    def across(self, x: md.Tensor, memory: md.Tensor) -> md.Tensor:
        """Returns attention of the positions of x to memory: [batch, memory_length, embed]."""
        return self.across_cached(x, self.of_memory(memory))

    def of_memory(self, memory: md.Tensor) -> LayerCache:
        """Returns keys and values of memory [batch, memory_length, embed], for `across_cached`."""
        return {"keys": self._key(memory), "values": self._value(memory)}

    def across_cached(
        self, x: md.Tensor, cache: LayerCache, mask: md.Tensor | None = None
    ) -> md.Tensor:
        """Returns attention of the positions of x to what `of_memory` has made of a memory."""
        q = self._query(x)
        scores = {"scale": self.scale, "soft_cap": self.soft_cap}
        return self._added(_attend(q, cache["keys"], cache["values"], mask=mask, **scores))

    def _rotated(self, x: md.Tensor, shared: Shared) -> tuple[md.Tensor, md.Tensor, md.Tensor]:
        q, k, v = self._query(x), self._key(x), self._value(x)
        rotation = shared.own_rotation
        if rotation is not None:
            q, k = rotation(q), rotation(k)
        return q, k, v

    def _attended(
        self, q: md.Tensor, k: md.Tensor, v: md.Tensor, shared: Shared, **options: Any
    ) -> md.Tensor:
        """Returns self-attention in the window, if the layer at hand has it."""
        options |= {"scale": self.scale, "soft_cap": self.soft_cap}
        if shared.windowed is False:
            return _attend(q, k, v, **options)
        if shared.windowed is None or shared.windowed is True:
            return _attend(q, k, v, window=self.window, **options)
        return md.cond(
            shared.windowed,
            lambda: _attend(q, k, v, window=self.window, **options),
            lambda: _attend(q, k, v, **options),
        )

    def _query(self, x: md.Tensor) -> md.Tensor:
        q = plus(md.einsum(x, self.query, over="embed"), self.query_bias)
        return q if self.query_norm is None else self.query_norm(q)

    def _key(self, x: md.Tensor) -> md.Tensor:
        k = plus(md.einsum(x, self.key, over="embed"), self.key_bias)
        return k if self.key_norm is None else self.key_norm(k)

    def _value(self, x: md.Tensor) -> md.Tensor:
        v = plus(md.einsum(x, self.value, over="embed"), self.value_bias)
        return v

    def _added(self, mixed: md.Tensor) -> md.Tensor:
        heads = self.out.shape.without(["embed"])
        attention_added = md.einsum(mixed, self.out, over=heads)
        return plus(attention_added, self.out_bias)


class LatentAttention(md.Module):
    """Multi-head latent attention (DeepSeek-AI 2024, "DeepSeek-V2", section 2.1).

    Keys and values of all heads are made of one latent vector per position, and queries of another;
    positions are in `rotary_kv` further features, whose keys the heads share.
    """

    query_down: md.Tensor | None  # embed, query_rank; None: queries of full rank
    query_norm: Norm | None
    query: md.Tensor  # query_rank or embed, heads, kv
    query_rotary: md.Tensor  # query_rank or embed, heads, rotary_kv
    key_value_down: md.Tensor  # embed, kv_rank
    key_value_norm: Norm
    key: md.Tensor  # kv_rank, heads, kv
    key_rotary: md.Tensor  # embed, rotary_kv
    value: md.Tensor  # kv_rank, heads, kv
    out: md.Tensor  # heads, kv, embed
    scale: float | None = md.static()
    window: int | None = md.static()

    def __call__(self, x: md.Tensor, shared: Shared) -> md.Tensor:
        q, q_rotary = self._queries(x, shared)
        latent, k_rotary = self._latent(x, shared)
        k = md.einsum(latent, self.key, over="kv_rank")
        v = md.einsum(latent, self.value, over="kv_rank")
        k_rotary = md.broadcast(
            k_rotary, [*k.shape.without(["kv"]), k_rotary.shape.get("rotary_kv")]
        )
        q = md.concat([q, q_rotary.rename(rotary_kv="kv")], "kv")
        k = md.concat([k, k_rotary.rename(rotary_kv="kv")], "kv").rename(length="memory_length")
        v = v.rename(length="memory_length")
        mixed = _attend(
            q,
            k,
            v,
            causal=shared.causal,
            segments=shared.segments,
            window=self.window,
            scale=self.scale,
        )
        return md.einsum(mixed, self.out, over=["heads", "kv"])

    def step(self, x: md.Tensor, shared: Shared, cache: LayerCache) -> tuple[md.Tensor, LayerCache]:
        """Returns attention of new positions to all that a cache holds, and the cache with them.

        Only latent vectors and rotated keys are kept, for all heads together. The projections of
        keys and values are applied to queries and results instead (section 2.1.2 of the paper).

        Args:
            cache: `latent`, [batch, memory_length, latent], of kv_rank and rotary_kv features.
        """
        assert shared.slots is not None
        q, q_rotary = self._queries(x, shared)
        latent, k_rotary = self._latent(x, shared)
        scale = self.scale
        if scale is None:
            scale = (q.shape.get("kv").size + q_rotary.shape.get("rotary_kv").size) ** -0.5
        rank = latent.shape.get("kv_rank").size
        q = md.einsum(q, self.key, over="kv").rename(kv_rank="latent")
        q = md.concat([q, q_rotary.rename(rotary_kv="latent")], "latent")
        latent, k_rotary = latent.rename(kv_rank="latent"), k_rotary.rename(rotary_kv="latent")
        kept = shared.slots.write(cache["latent"], md.concat([latent, k_rotary], "latent"))
        # All of the features are mixed, and those of positions left out then: that reads the cache
        # as it is, without a copy.
        mixed = _attend(
            q,
            kept,
            kept,
            causal=True,
            features="latent",
            window=self.window,
            scale=scale,
            **shared.slots.visible,
        )
        mixed = md.slice(mixed, "latent", 0, rank).rename(latent="kv_rank")
        mixed = md.einsum(mixed, self.value, over="kv_rank")
        return md.einsum(mixed, self.out, over=["heads", "kv"]), {"latent": kept}

    def _queries(self, x: md.Tensor, shared: Shared) -> tuple[md.Tensor, md.Tensor]:
        """Returns queries [batch, length, heads, kv], and those of positions, rotated."""
        assert shared.rotation is not None
        source, over = x, "embed"
        if self.query_down is not None and self.query_norm is not None:
            source, over = (
                self.query_norm(md.einsum(x, self.query_down, over="embed")),
                "query_rank",
            )
        q = md.einsum(source, self.query, over=over)
        return q, shared.rotation(md.einsum(source, self.query_rotary, over=over))

    def _latent(self, x: md.Tensor, shared: Shared) -> tuple[md.Tensor, md.Tensor]:
        """Returns latent vectors [batch, length, kv_rank], and keys of positions, rotated."""
        assert shared.rotation is not None
        latent = self.key_value_norm(md.einsum(x, self.key_value_down, over="embed"))
        return latent, shared.rotation(md.einsum(x, self.key_rotary, over="embed"))


def _attend(q: md.Tensor, k: md.Tensor, v: md.Tensor, **options: Any) -> md.Tensor:
    """Returns attention with names for what it reads and leaves, which `remat` may keep."""
    q, k = md.name(q, "attention_query"), md.name(k, "attention_key")
    v = md.name(v, "attention_value")
    attention_out = md.attention(q, k, v, **options)
    return md.name(attention_out, "attention_out")


def empty_cache(config: TransformerConfig, front: Sequence[Dimension]) -> dict[str, md.Tensor]:
    """Returns zeros for `cache` of attention's `step`.

    Args:
        front: the dims before those of features: layers, batch, memory_length.
    """
    _, _, heads, kv, *_ = config.dims
    dtype = config.policy.compute
    if config.attention == "latent":
        latent = Dimension("latent", config.kv_rank_size + config.rotary_kv_size)
        return {"latent": md.zeros([*front, latent], dtype)}
    return {name: md.zeros([*front, heads, kv], dtype) for name in ("keys", "values")}


def init_attention(
    config: TransformerConfig, draw: Drawing, front: Sequence[Dimension]
) -> Attention | LatentAttention:
    """Returns attention of the kind of the configuration; `front` dims stack several."""
    if config.attention == "latent":
        return _init_latent(config, draw, front)
    return init_multihead(config, draw, front)


def init_multihead(
    config: TransformerConfig, draw: Drawing, front: Sequence[Dimension]
) -> Attention:
    """Returns multi-head attention."""
    _, embed, heads, kv, *_ = config.dims
    group = config.group_dims

    def zeros(*dims: Dimension, there: bool = config.bias or config.qkv_bias) -> md.Tensor | None:
        return draw.zeros([*front, *dims]) if there else None

    return Attention(
        query=draw.into(embed, [*front, embed, heads, *group, kv]),
        key=draw.into(embed, [*front, embed, heads, kv]),
        value=draw.into(embed, [*front, embed, heads, kv]),
        out=draw.into([heads, *group, kv], [*front, heads, *group, kv, embed], config.quieter),
        query_bias=zeros(heads, *group, kv),
        key_bias=zeros(heads, kv),
        value_bias=zeros(heads, kv),
        out_bias=zeros(embed, there=config.bias),
        query_norm=init_norm(config, draw, [*front, kv]) if config.query_key_norm else None,
        key_norm=init_norm(config, draw, [*front, kv]) if config.query_key_norm else None,
        scale=config.attention_scale,
        soft_cap=config.attention_soft_cap,
        window=config.window,
    )


def _init_latent(
    config: TransformerConfig, draw: Drawing, front: Sequence[Dimension]
) -> LatentAttention:
    _, embed, heads, kv, *_ = config.dims
    kv_rank, rotary = md.dims(kv_rank=config.kv_rank_size, rotary_kv=config.rotary_kv_size)
    source = embed
    down, norm = None, None
    if config.query_rank is not None:
        source = Dimension("query_rank", config.query_rank)
        down = draw.into(embed, [*front, embed, source])
        norm = init_norm(config, draw, [*front, source])
    return LatentAttention(
        query_down=down,
        query_norm=norm,
        query=draw.into(source, [*front, source, heads, kv]),
        query_rotary=draw.into(source, [*front, source, heads, rotary]),
        key_value_down=draw.into(embed, [*front, embed, kv_rank]),
        key_value_norm=init_norm(config, draw, [*front, kv_rank]),
        key=draw.into(kv_rank, [*front, kv_rank, heads, kv]),
        key_rotary=draw.into(embed, [*front, embed, rotary]),
        value=draw.into(kv_rank, [*front, kv_rank, heads, kv]),
        out=draw.into([heads, kv], [*front, heads, kv, embed], config.quieter),
        scale=config.query_scale,
        window=config.window,
    )
