"""T5, T5 v1.1 and their kin (Raffel et al. 2020; v1.1 and mT5: Xue et al. 2021, section 3.1).

Version 1.1 has gated MLPs and a head of its own. The first layer of each stack has the table of
distances for all its layers, as here for the stack.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from meshdsl.models.huggingface.describing import misfits
from meshdsl.models.huggingface.family import Family
from meshdsl.models.huggingface.placing import Part
from meshdsl.models.huggingface.settings import Settings
from meshdsl.models.t5 import T5Config, t5

_MLPS = {
    "relu": "relu",
    "gated-gelu": "geglu",
    "gated-gelu_new": "geglu",
    "gated-silu": "swiglu",
    "gelu_new": "gelu",
    "gelu": "exact_gelu",
}
_STACKS = {"encoder": 1, "decoder": 2}  # and where their MLPs are among the parts of a layer
_FREE = "mlp tied decoder_start relative_buckets relative_distance"
_ALWAYS: dict[str, Any] = {"positions": "relative", "scaled": False}
_QKV = ("query", "key", "value")


def _attention(path: str, name: str) -> dict[str, Part]:
    into = {f"{path}/{own}": Part(f"{name}.{own[0]}.weight", "heads kv, embed") for own in _QKV}
    return {**into, f"{path}/out": Part(f"{name}.o.weight", "embed, heads kv")}


def _stack(stack: str, mlp: int) -> dict[str, Part]:
    layer, blocks = f"{stack}.block.{{layers}}.layer.", f"{stack}/blocks"
    cross = _attention(f"{blocks}/cross", f"{layer}1.EncDecAttention") if mlp == 2 else {}
    norms = {"attention": 0, "cross": 1, "mlp": mlp}
    return {
        f"{stack}/distances": Part(
            f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight",
            "buckets, heads",
        ),
        **_attention(f"{blocks}/attention", f"{layer}0.SelfAttention"),
        **cross,
        **{
            f"{blocks}/{name}_norm/scale": Part(f"{layer}{number}.layer_norm.weight", "embed")
            for name, number in norms.items()
        },
        f"{blocks}/mlp/w_gate": Part(f"{layer}{mlp}.DenseReluDense.wi_0.weight", "d_ff, embed"),
        f"{blocks}/mlp/w_out": Part(f"{layer}{mlp}.DenseReluDense.wo.weight", "embed, d_ff"),
        f"{stack}/final_norm/scale": Part(f"{stack}.final_layer_norm.weight", "embed"),
    }


PARTS = {
    "embedding": Part("shared.weight", "vocab, embed"),
    **_stack("encoder", _STACKS["encoder"]),
    **_stack("decoder", _STACKS["decoder"]),
    "unembedding": Part("lm_head.weight", "vocab, embed"),
}


def _into_mlp(config: T5Config) -> Mapping[str, Part]:
    """Returns the parts of the first projection of MLPs, which a gate gives another name."""
    name = "wi_1" if config.gated else "wi"
    return {
        f"{stack}/blocks/mlp/w_in": Part(
            f"{stack}.block.{{layers}}.layer.{number}.DenseReluDense.{name}.weight", "d_ff, embed"
        )
        for stack, number in _STACKS.items()
    }


def configure(settings: Settings) -> T5Config:
    """Returns the configuration of a folder of T5."""
    # transformers 5 ties in every config.json, and says otherwise what the head is.
    own_head = settings.get("tie_word_embeddings", True) is False
    own_head = own_head or settings.get("scale_decoder_outputs", True) is False
    return _configured(settings, mlp="relu", tied=not own_head)


def configure_mt5(settings: Settings) -> T5Config:
    """Returns the configuration of a folder of mT5, whose head is always its own."""
    return _configured(settings, mlp="gated-gelu", tied=False)


def _configured(settings: Settings, mlp: str, tied: bool) -> T5Config:
    settings.only("is_encoder_decoder", True)
    layers = settings.whole("num_layers", 6)
    settings.only("num_decoder_layers", layers)
    return T5Config(
        layers=layers,
        embed=settings.whole("d_model", 512),
        heads=settings.whole("num_heads", 8),
        kv=settings.whole("d_kv", 64),
        d_ff=settings.whole("d_ff", 2048),
        vocab=settings.whole("vocab_size", 32128),
        max_length=settings.whole("n_positions", 512),
        norm_eps=settings.number("layer_norm_epsilon", 1e-6),
        relative_buckets=settings.whole("relative_attention_num_buckets", 32),
        relative_distance=settings.whole("relative_attention_max_distance", 128),
        mlp=settings.choice("feed_forward_proj", _MLPS, mlp),
        tied=tied,
        decoder_start=_start(settings),
        **_ALWAYS,
    )


def _start(settings: Settings) -> int:
    """Returns the token that the decoder begins with: by default, the pad."""
    name = "decoder_start_token_id"
    start = settings.get(name, settings.get("pad_token_id", 0))
    if isinstance(start, bool) or not isinstance(start, int) or start < 0:
        settings.problems.append(f"{name}={start!r}: needs the number of a token")
        return 0
    return start


def describe(config: Any) -> tuple[dict[str, Any], list[str]]:
    """Returns the settings of a model, and what keeps it from being T5."""
    problems = misfits(config, _FREE, T5Config, **_ALWAYS)
    if problems:
        return {}, problems
    if config.kv_heads_size != config.heads:
        problems.append("needs keys for every head: no kv_heads")
    return {
        "num_layers": config.layers,
        "num_decoder_layers": config.layers,
        "d_model": config.embed,
        "num_heads": config.heads,
        "d_kv": config.kv_size,
        "d_ff": config.d_ff_size,
        "vocab_size": config.vocab,
        "n_positions": config.max_length,
        "layer_norm_epsilon": config.eps,
        "relative_attention_num_buckets": config.relative_buckets,
        "relative_attention_max_distance": config.relative_distance,
        "feed_forward_proj": next(name for name, mlp in _MLPS.items() if mlp == config.mlp),
        "tie_word_embeddings": config.tied,
        "is_encoder_decoder": True,
        "decoder_start_token_id": config.decoder_start or 0,
        "pad_token_id": 0,
        "eos_token_id": 1,
    }, problems


def describe_mt5(config: Any) -> tuple[dict[str, Any], list[str]]:
    """Returns the settings of a model, and what keeps it from being mT5."""
    settings, problems = describe(config)
    if not problems and config.tied:
        problems = ["needs tied=false"]
    return settings, problems


T5 = Family(
    name="t5",
    architecture="T5ForConditionalGeneration",
    configure=configure,
    describe=describe,
    parts=PARTS,
    more=_into_mlp,
    make=t5,
    unused=("decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight",),
    tied=("encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight"),
)
MT5 = replace(
    T5,
    name="mt5",
    architecture="MT5ForConditionalGeneration",
    configure=configure_mt5,
    describe=describe_mt5,
)
