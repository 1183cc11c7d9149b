"""The configuration of the decoder-only transformer, and the named ones."""

from __future__ import annotations

import typing
from dataclasses import dataclass, field, fields
from typing import Literal

import meshdsl as md
from meshdsl.dims import Dimension


@dataclass(frozen=True)
class TransformerConfig:
    """Sizes and variants of a decoder-only transformer.

    Fields that are None follow from the others, so that an override of `embed` or `heads` keeps
    the configuration consistent.

    Attributes:
        heads: query heads.
        kv_heads: heads of keys and values; None: as many as `heads`. Fewer is grouped-query
            attention: dim `heads` then counts these, and dim `group` the queries of each.
        kv: features of one head; None: embed / heads.
        d_ff: hidden size of the MLP; None: 4 embed, or, gated, 8/3 embed rounded up to 256s.
        max_length: the number of learned positions; rotary ones have no limit.
        activation: "gelu", or "gated_silu" (SwiGLU).
        bias: whether projections and layer norms have biases.
        tied: whether the embedding also makes the logits.
        remat: "full" computes each block again in the backward pass rather than keep its values.
        policy: the dtypes of parameters, computation, and logits.

    Raises:
        ValueError: sizes that do not fit each other; every problem is told.
    """

    layers: int
    embed: int
    heads: int
    vocab: int
    max_length: int
    kv_heads: int | None = None
    kv: int | None = None
    d_ff: int | None = None
    norm: Literal["rms", "layer"] = "rms"
    positions: Literal["rotary", "learned"] = "rotary"
    activation: Literal["gelu", "gated_silu"] = "gelu"
    bias: bool = False
    tied: bool = True
    remat: Literal["none", "full"] = "none"
    rotary_base: float = 10000.0
    policy: md.Policy = field(default_factory=md.Policy)

    def __post_init__(self) -> None:
        problems = self._misfits()
        if problems:
            raise ValueError("; ".join(problems))

    @property
    def kv_heads_size(self) -> int:
        return self.kv_heads or self.heads

    @property
    def kv_size(self) -> int:
        return self.kv or self.embed // self.heads

    @property
    def d_ff_size(self) -> int:
        if self.d_ff is not None:
            return self.d_ff
        return 4 * self.embed if self.activation == "gelu" else -(-8 * self.embed // 768) * 256

    @property
    def group_dims(self) -> tuple[Dimension, ...]:
        """The dim `group` of grouped-query attention; nothing for multi-head attention."""
        size = self.heads // self.kv_heads_size
        return (Dimension("group", size),) if size > 1 else ()

    @property
    def dims(self) -> tuple[Dimension, ...]:
        """The dims layers, embed, heads, kv, d_ff, vocab, max_length."""
        return md.dims(
            layers=self.layers,
            embed=self.embed,
            heads=self.kv_heads_size,
            kv=self.kv_size,
            d_ff=self.d_ff_size,
            vocab=self.vocab,
            max_length=self.max_length,
        )

    def _misfits(self) -> list[str]:
        problems = []
        hints = typing.get_type_hints(type(self))
        for one in fields(self):
            value, kind = getattr(self, one.name), hints[one.name]
            if typing.get_origin(kind) is Literal and value not in typing.get_args(kind):
                choices = ", ".join(typing.get_args(kind))
                problems.append(f"{one.name}={value!r}: choose from {choices}")
            elif kind in (int, int | None) and value is not None and value < 1:
                problems.append(f"{one.name}={value}: needs to be at least 1")
        if problems:
            return problems
        if self.kv is None and self.embed % self.heads:
            problems.append(f"embed={self.embed} does not divide into heads={self.heads}; give kv")
        if self.heads % self.kv_heads_size:
            problems.append(f"heads={self.heads} do not share kv_heads={self.kv_heads} equally")
        if self.positions == "rotary" and self.kv_size % 2:
            problems.append(
                f"rotary positions turn features in pairs, but kv={self.kv_size} is odd"
            )
        return problems


@dataclass(frozen=True)
class Named:
    """A named configuration with the batch it is usually trained on."""

    config: TransformerConfig
    batch_size: int
    length: int


def _gpt2(layers: int, embed: int, heads: int) -> Named:
    """Radford et al. 2019, table 2; as Megatron-LM does, the vocabulary of 50,257 is padded."""
    config = TransformerConfig(
        layers, embed, heads, 50304, 1024, norm="layer", positions="learned", bias=True
    )
    return Named(config, batch_size=512, length=1024)


CONFIGS = {
    "gpt_mini": Named(TransformerConfig(4, 256, 8, 256, 1024), batch_size=16, length=128),
    "gpt2_small": _gpt2(layers=12, embed=768, heads=12),
    "gpt2_medium": _gpt2(layers=24, embed=1024, heads=16),
    "gpt2_xl": _gpt2(layers=48, embed=1600, heads=25),
    # Touvron et al. 2023, "LLaMA", table 2.
    "llama_7b": Named(
        TransformerConfig(32, 4096, 32, 32000, 2048, activation="gated_silu", tied=False),
        batch_size=2048,
        length=2048,
    ),
    # Grattafiori et al. 2024, "The Llama 3 herd of models", table 3.
    "llama3_8b": Named(
        TransformerConfig(
            32,
            4096,
            32,
            128256,
            8192,
            kv_heads=8,
            d_ff=14336,
            activation="gated_silu",
            tied=False,
            rotary_base=500000.0,
        ),
        batch_size=512,
        length=8192,
    ),
    # Brown et al. 2020, table 2.1; vocabulary padded from 50,257 to 51,200 and batch as in
    # Narayanan et al. 2021, "Efficient large-scale language model training", section 5.1.
    "gpt3_175b": Named(
        TransformerConfig(
            96,
            12288,
            96,
            51200,
            2048,
            norm="layer",
            positions="learned",
            bias=True,
            remat="full",
        ),
        batch_size=1536,
        length=2048,
    ),
}
