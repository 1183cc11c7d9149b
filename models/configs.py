"""The configuration of transformers: their sizes, and the kinds of each part."""

from __future__ import annotations

import math
import typing
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, Self

import meshdsl as md
from meshdsl.models import remat
from meshdsl.nn.positions import RotaryScaling
from meshdsl.nn.routing import route_misfits
from meshdsl.tensors.dims import Dimension


@dataclass(frozen=True)
class TransformerConfig:
    """Sizes and kinds of the parts of a transformer: decoder-only, encoder, or both.

    Fields that are None follow from the others, so that an override of `embed` or `heads` keeps
    the configuration consistent.

    Attributes:
        layers: blocks of a stack; an encoder-decoder has two stacks.
        heads: query heads.
        kv_heads: heads of keys and values; None: as many as `heads`. Fewer is grouped-query
            attention: dim `heads` then counts these, and dim `group` the queries of each.
        kv: features of one head; None: embed / heads.
        d_ff: hidden size of the MLP, or of one expert; None: 4 embed, or, gated, 8/3 embed
            rounded up to 256s.
        max_length: the number of learned positions; the other kinds have no limit.
        norm_order: "pre" normalises what a layer reads, "post" the stream that it leaves, "both"
            what it reads and what it adds to the stream (Gemma 2, 2024, section 2).
        norm_unit_offset: whether norms multiply by 1 + scale, so that decay pulls them to 1.
        norm_eps: added to variances; None: 1e-6 for "rms", 1e-5 for "layer".
        positions: "rotary" turns queries and keys; "learned" adds embeddings; "relative" and
            "alibi" add to the scores, by learned buckets of distances or in proportion to them.
        rotary_scaling, rotary_factor, rotary_low, rotary_high, rotary_original, rotary_short,
            rotary_long, rotary_magnitude: slower rotations, as `nn.RotaryScaling` makes them.
        rotary_window_base: the base of rotations in layers with the window, which are not scaled;
            None: they turn as all others do (Gemma Team 2025, "Gemma 3", section 2).
        attention: "multihead" (with `kv_heads`, grouped-query), or "latent": keys and values of all
            heads come from `kv_rank` features, and `rotary_kv` more tell positions.
        scaled: whether multi-head scores are divided by sqrt(kv).
        query_scale: what scores are multiplied by instead, also those of latent attention; None:
            nothing else.
        attention_soft_cap, logit_soft_cap: scores s of attention, and of tokens in decoders, become
            cap * tanh(s / cap). None: they stay as they are.
        query_key_norm: whether queries and keys of each head are normalised (Dehghani et al. 2023,
            "Scaling vision transformers to 22 billion parameters", section 2).
        window: hides what is this many positions away or more; None: nothing.
        window_pattern: which layers have the window, 1 or 0 for each, again and again; for
            decoders. Nothing: all have it.
        query_rank: with latent attention, the rank of the queries; None: full.
        mlp: "gelu", "relu", or gated: "swiglu", "geglu". GELU is in its tanh form, but for
            "exact_gelu".
        experts: how many such MLPs a token can be sent to; 0: one MLP for all.
        experts_per_token: how many it is sent to.
        shared_experts: the hidden size, in units of d_ff, of an MLP for all tokens beside them.
        capacity: tokens that an expert (or a peer) takes, in multiples of an equal share per
            sequence; the others pass it by. None drops nothing.
        report_dropped: whether the loss has the metric `dropped_choices` beside it: the share of
            the choices of tokens that `capacity` drops.
        dispatch: how tokens get to experts and back, as in `nn.moe`.
        expert_peers: with dispatch=sort, among how many devices the layout splits the experts, so
            that tokens are sent to them; with 1, parameters are sent instead.
        dense_layers: the first layers have one MLP for all tokens instead of experts.
        dense_d_ff: its hidden size; None: that of all experts of a token together.
        router_score, router_normalise, router_scale, router_groups, router_chosen_groups,
            router_group_score: options of `nn.route`, without the `router_`.
        router_bias: whether the choice of experts has a bias, zeros at first, which each step
            balances by `nn.balance_bias`; for decoders. Let balance_weight be small then, or 0.
        balance_weight, router_z_weight: of the router's losses, in the loss of training.
        bias: whether projections and layer norms have biases.
        qkv_bias: whether queries, keys and values have biases where `bias` gives none.
        tied: whether the embedding also makes the logits.
        scaled_embedding: whether embeddings are multiplied by sqrt(embed); for decoders.
        remat: what each block's backward pass computes again rather than keep: "none", "full", or
            all but something: "dots", "names:attention_out+mlp_hidden", "keep_collectives". See
            `models.remat`.
        policy: the dtypes of parameters, computation, and logits.

    Raises:
        ValueError: sizes that do not fit each other; every problem is told.

    Examples:
        >>> from meshdsl.models import TransformerConfig
        >>> config = TransformerConfig(layers=2, embed=64, heads=4, vocab=256, max_length=128)
        >>> config.kv_size, config.d_ff_size
        (16, 256)
        >>> TransformerConfig(layers=2, embed=64, heads=5, vocab=256, max_length=128)
        Traceback (most recent call last):
        ValueError: embed=64 does not divide into heads=5; give kv
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
    norm_order: Literal["pre", "post", "both"] = "pre"
    norm_unit_offset: bool = False
    norm_eps: float | None = None
    positions: Literal["rotary", "learned", "relative", "alibi", "none"] = "rotary"
    rotary_base: float = 10000.0
    rotary_window_base: float | None = None
    rotary_scaling: Literal["none", "linear", "dynamic", "llama3", "yarn", "longrope"] = "none"
    rotary_factor: float = 1.0
    rotary_low: float = 1.0
    rotary_high: float = 4.0
    rotary_original: int = 8192
    rotary_short: tuple[float, ...] = ()
    rotary_long: tuple[float, ...] = ()
    rotary_magnitude: float | None = None
    relative_buckets: int = 32
    relative_distance: int = 128
    attention: Literal["multihead", "latent"] = "multihead"
    scaled: bool = True
    query_scale: float | None = None
    attention_soft_cap: float | None = None
    logit_soft_cap: float | None = None
    query_key_norm: bool = False
    window: int | None = None
    window_pattern: tuple[int, ...] = ()
    query_rank: int | None = None
    kv_rank: int | None = None
    rotary_kv: int | None = None
    mlp: Literal["gelu", "exact_gelu", "relu", "swiglu", "geglu"] = "gelu"
    experts: int = 0
    experts_per_token: int = 2
    shared_experts: int = 0
    capacity: float | None = None
    report_dropped: bool = False
    dispatch: Literal["einsum", "gather", "sort"] = "einsum"
    expert_peers: int = 1
    dense_layers: int = 0
    dense_d_ff: int | None = None
    router_score: Literal["softmax", "sigmoid"] = "softmax"
    router_normalise: bool = True
    router_scale: float = 1.0
    router_groups: int = 1
    router_chosen_groups: int = 1
    router_group_score: Literal["max", "top2"] = "max"
    router_bias: bool = False
    balance_weight: float = 0.01
    router_z_weight: float = 0.001
    bias: bool = False
    qkv_bias: bool = False
    tied: bool = True
    scaled_embedding: bool = False
    remat: str = "none"
    policy: md.Policy = field(default_factory=md.Policy)

    def __post_init__(self) -> None:
        problems = self._misfits()
        if problems:
            raise ValueError("; ".join(problems))

    @property
    def may_be_zero(self) -> tuple[str, ...]:
        """The whole numbers that may be 0."""
        return ("experts", "shared_experts", "dense_layers", "window_pattern")

    @property
    def kv_heads_size(self) -> int:
        return self.kv_heads or self.heads

    @property
    def kv_size(self) -> int:
        return self.kv or self.embed // self.heads

    @property
    def gated(self) -> bool:
        return self.mlp in ("swiglu", "geglu")

    @property
    def d_ff_size(self) -> int:
        if self.d_ff is not None:
            return self.d_ff
        return -(-8 * self.embed // 768) * 256 if self.gated else 4 * self.embed

    @property
    def dense_d_ff_size(self) -> int:
        return self.dense_d_ff or self.d_ff_size * (self.experts_per_token + self.shared_experts)

    @property
    def router_options(self) -> tuple[tuple[str, Any], ...]:
        """The options of `nn.route`, by name."""
        names = ("score", "normalise", "scale", "groups", "chosen_groups", "group_score")
        return tuple((name, getattr(self, f"router_{name}")) for name in names)

    @property
    def eps(self) -> float:
        default = 1e-6 if self.norm == "rms" else 1e-5
        return default if self.norm_eps is None else self.norm_eps

    @property
    def quieter(self) -> float:
        """A factor on what is added to the residual stream, of which each block has two."""
        return 1 / math.sqrt(2 * self.layers)

    @property
    def kv_rank_size(self) -> int:
        return self.kv_rank or 4 * self.kv_size

    @property
    def rotary_kv_size(self) -> int:
        return self.rotary_kv or self.kv_size // 2

    @property
    def scaling(self) -> RotaryScaling | None:
        """What slows rotary positions down, if anything."""
        kind = self.rotary_scaling
        if kind == "none":
            return None
        return RotaryScaling(
            kind,
            self.rotary_factor,
            self.rotary_low,
            self.rotary_high,
            self.rotary_original,
            self.rotary_short,
            self.rotary_long,
            self.rotary_magnitude,
        )

    @property
    def attention_scale(self) -> float | None:
        """What scores of multi-head attention are multiplied by; None: 1 / sqrt(kv)."""
        return self.query_scale if self.scaled else 1.0

    @property
    def windowed(self) -> tuple[bool, ...]:
        """Whether each layer has the window; empty if all of them do, or none."""
        pattern = self.window_pattern
        layers = [bool(pattern[n % len(pattern)]) for n in range(self.layers) if pattern]
        return tuple(layers) if len({*layers}) > 1 else ()

    @property
    def common_window(self) -> int | None:
        """The window of all layers; None if some see everything."""
        return None if self.windowed else self.window

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

    def with_changes(self, changes: Mapping[str, Any]) -> Self:
        """Returns the configuration with some fields changed, as a user overrides them.

        `dispatch=sort` with one peer drops no token. It leaves the capacity out that the
        configuration has, unless `changes` gives one.
        """
        chosen = {"dispatch": self.dispatch, "expert_peers": self.expert_peers, **changes}
        if chosen["dispatch"] == "sort" and chosen["expert_peers"] == 1:
            changes = {"capacity": None, **changes}
        return replace(self, **changes)

    def _misfits(self) -> list[str]:
        problems = values_out_of_range(self, self.may_be_zero)
        try:
            remat.read(self.remat)
        except ValueError as error:
            problems.append(f"remat: {error}")
        if not problems:  # else what follows may divide by nothing
            problems = [
                *self._attention_misfits(),
                *self._rotary_misfits(),
                *self._expert_misfits(),
            ]
        return problems

    def _attention_misfits(self) -> list[str]:
        problems = []
        if self.kv is None and self.embed % self.heads:
            problems.append(f"embed={self.embed} does not divide into heads={self.heads}; give kv")
        if self.heads % self.kv_heads_size:
            problems.append(f"heads={self.heads} do not share kv_heads={self.kv_heads} equally")
        if self.query_scale is not None and not self.scaled:
            problems.append(f"query_scale={self.query_scale:g} needs scaled=true")
        for name in ("query_scale", "attention_soft_cap", "logit_soft_cap"):
            if getattr(self, name) == 0:
                problems.append(f"{name}=0: needs to be above 0")
        if self.window_pattern and self.window is None:
            problems.append("window_pattern says which layers have a window; give window")
        if self.window_pattern and (
            {*self.window_pattern} - {0, 1} or not any(self.window_pattern)
        ):
            problems.append(
                f"window_pattern={self.window_pattern}: needs 1 or 0 for each layer, and a 1"
            )
        if self.window_pattern and self.dense_layers:
            problems.append("window_pattern is for layers of one kind; leave dense_layers out")
        if self.attention == "latent":
            multihead = "qkv_bias query_key_norm window_pattern attention_soft_cap"
            for name in (*multihead.split(), "rotary_window_base"):
                if getattr(self, name):
                    problems.append(f"{name} is for multi-head attention; leave it out")
            if self.kv_heads is not None:
                problems.append("latent attention has keys for every head; leave kv_heads out")
            if self.positions != "rotary":
                problems.append(f"latent attention needs positions=rotary, not {self.positions}")
        return problems

    def _rotary_misfits(self) -> list[str]:
        problems = []
        turned = "rotary_kv" if self.attention == "latent" else "kv"
        size = getattr(self, f"{turned}_size")
        if self.positions == "rotary" and size % 2:
            problems.append(f"rotary positions turn features in pairs, but {turned}={size} is odd")
        if self.rotary_window_base is not None and self.positions != "rotary":
            problems.append(f"rotary_window_base needs positions=rotary, not {self.positions}")
        if self.rotary_window_base is not None and self.window is None:
            problems.append("rotary_window_base is for layers with a window; give window")
        if self.rotary_scaling != "none" and self.rotary_factor < 1:
            problems.append(f"rotary_factor={self.rotary_factor:g}: needs to be at least 1")
        if self.rotary_scaling == "dynamic" and size < 4:
            problems.append(f"rotary_scaling=dynamic needs {turned} of at least 4, not {size}")
        for name in ("rotary_short", "rotary_long"):
            divisors, needed = getattr(self, name), size // 2
            if self.rotary_scaling != "longrope":
                needed = 0
            if len(divisors) != needed or not all(each > 0 for each in divisors):
                problems.append(
                    f"{name}: {len(divisors)} numbers; rotary_scaling={self.rotary_scaling} needs "
                    f"{needed}" + (", above 0, one for each pair of features" if needed else "")
                )
        if self.rotary_scaling == "longrope" and self.rotary_original < 2:
            problems.append("rotary_scaling=longrope needs rotary_original of at least 2")
        if self.rotary_magnitude is not None and (
            self.rotary_scaling == "none" or self.rotary_magnitude == 0
        ):
            problems.append(
                f"rotary_magnitude={self.rotary_magnitude:g}: needs to be above 0, and a "
                "rotary_scaling"
            )
        if self.rotary_scaling in ("llama3", "yarn") and self.rotary_low >= self.rotary_high:
            problems.append(
                f"rotary_low={self.rotary_low:g} needs to be below rotary_high={self.rotary_high:g}"
            )
        return problems

    def _expert_misfits(self) -> list[str]:
        problems = []
        if self.experts and self.experts_per_token > self.experts:
            problems.append(
                f"experts_per_token={self.experts_per_token} of experts={self.experts}: too many"
            )
        elif self.experts:
            problems += route_misfits(
                Dimension("experts", self.experts),
                self.experts_per_token,
                self.router_groups,
                self.router_chosen_groups,
                self.router_group_score,
            )
        if self.router_bias and not self.experts:
            problems.append("router_bias balances experts; give experts")
        if self.dense_layers and not self.experts:
            problems.append(f"dense_layers={self.dense_layers} precede others; give experts")
        if self.dense_layers >= self.layers:
            problems.append(
                f"dense_layers={self.dense_layers} of layers={self.layers} leave none for experts"
            )
        if self.dispatch == "sort" and self.expert_peers == 1 and self.capacity is not None:
            problems.append(
                "dispatch=sort with expert_peers=1 drops nothing; leave "
                f"capacity={self.capacity:g} out"
            )
        if self.capacity is not None and not self.capacity > 0:
            problems.append(f"capacity={self.capacity:g}: needs to be above 0; none drops nothing")
        if self.report_dropped and self.capacity is None:
            problems.append("report_dropped: without a capacity nothing is dropped; leave it out")
        if self.expert_peers > 1 and self.dispatch != "sort":
            problems.append(
                f"expert_peers={self.expert_peers} needs dispatch=sort, not {self.dispatch}"
            )
        elif self.experts % self.expert_peers:
            problems.append(
                f"experts={self.experts} do not divide among expert_peers={self.expert_peers}"
            )
        if self.shared_experts and not self.experts:
            problems.append(
                f"shared_experts={self.shared_experts} stand beside others; give experts"
            )
        return problems


def values_out_of_range(config: Any, may_be_zero: Collection[str] = ()) -> list[str]:
    """Returns what is wrong with single fields: unknown choices, numbers that are too small."""
    problems = []
    hints = typing.get_type_hints(type(config))
    for one in fields(config):
        value, kind = getattr(config, one.name), hints[one.name]
        low = 0 if one.name in may_be_zero else 1
        if typing.get_origin(kind) is Literal and value not in typing.get_args(kind):
            choices = ", ".join(typing.get_args(kind))
            problems.append(f"{one.name}={value!r}: choose from {choices}")
        elif kind in (int, int | None) and value is not None and value < low:
            problems.append(f"{one.name}={value}: needs to be at least {low}")
        elif kind == tuple[int, ...] and min(value, default=0) < low:
            problems.append(f"{one.name}={value}: each needs to be at least {low}")
        elif kind in (float, float | None) and value is not None and value < 0:
            problems.append(f"{one.name}={value}: needs to be at least 0")
    return problems
