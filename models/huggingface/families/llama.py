"""Llama 2 and 3 (Touvron et al. 2023; Grattafiori et al. 2024), and what many families share.

Feature i of a head is turned with feature i + kv/2, as here, so that no feature changes its place.
"""

from __future__ import annotations

from typing import Any

from meshdsl.models.configs import TransformerConfig
from meshdsl.models.huggingface.describing import misfits
from meshdsl.models.huggingface.families.rotary import ROTARY, described_rotary, rotary
from meshdsl.models.huggingface.family import Family
from meshdsl.models.huggingface.placing import Part
from meshdsl.models.huggingface.settings import Settings
from meshdsl.models.transformer import transformer

LAYER = "model.layers.{layers}."
ATTENTION = f"{LAYER}self_attn."
UNUSED = ("*rotary_emb.inv_freq",)

OUTER = {
    "embedding": Part("model.embed_tokens.weight", "vocab, embed"),
    "final_norm/scale": Part("model.norm.weight", "embed"),
    "unembedding": Part("lm_head.weight", "vocab, embed"),
}
NORMS = {
    "blocks/attention_norm/scale": Part(f"{LAYER}input_layernorm.weight", "embed"),
    "blocks/mlp_norm/scale": Part(f"{LAYER}post_attention_layernorm.weight", "embed"),
}
PROJECTIONS = {
    "blocks/attention/query": Part(f"{ATTENTION}q_proj.weight", "heads group kv, embed"),
    "blocks/attention/key": Part(f"{ATTENTION}k_proj.weight", "heads kv, embed"),
    "blocks/attention/value": Part(f"{ATTENTION}v_proj.weight", "heads kv, embed"),
    "blocks/attention/out": Part(f"{ATTENTION}o_proj.weight", "embed, heads group kv"),
    "blocks/attention/query_bias": Part(f"{ATTENTION}q_proj.bias", "heads group kv"),
    "blocks/attention/key_bias": Part(f"{ATTENTION}k_proj.bias", "heads kv"),
    "blocks/attention/value_bias": Part(f"{ATTENTION}v_proj.bias", "heads kv"),
    "blocks/attention/out_bias": Part(f"{ATTENTION}o_proj.bias", "embed"),
}
MLP = {
    "blocks/mlp/w_gate": Part(f"{LAYER}mlp.gate_proj.weight", "d_ff, embed"),
    "blocks/mlp/w_in": Part(f"{LAYER}mlp.up_proj.weight", "d_ff, embed"),
    "blocks/mlp/w_out": Part(f"{LAYER}mlp.down_proj.weight", "embed, d_ff"),
}
PARTS = {**OUTER, **NORMS, **PROJECTIONS, **MLP}


def common(settings: Settings, **defaults: Any) -> dict[str, Any]:
    """Returns the fields of a configuration that most families name alike."""
    embed, heads = settings.whole("hidden_size"), settings.whole("num_attention_heads")
    kv = defaults.get("kv") or (None if embed % heads else embed // heads)
    return {
        "layers": settings.whole("num_hidden_layers"),
        "embed": embed,
        "heads": heads,
        "kv_heads": settings.whole("num_key_value_heads", defaults.get("kv_heads", heads)),
        "kv": settings.whole("head_dim", kv),
        "d_ff": settings.whole("intermediate_size"),
        "vocab": settings.whole("vocab_size"),
        "max_length": settings.whole("max_position_embeddings", defaults.get("max_length", 2048)),
        "norm_eps": settings.number("rms_norm_eps", defaults.get("norm_eps", 1e-6)),
        "tied": bool(settings.get("tie_word_embeddings", defaults.get("tied", False))),
        **rotary(settings),
    }


def described(config: TransformerConfig) -> dict[str, Any]:
    """Returns the settings that most families name alike, for transformers 4 and 5."""
    return {
        "num_hidden_layers": config.layers,
        "hidden_size": config.embed,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads_size,
        "head_dim": config.kv_size,
        "intermediate_size": config.d_ff_size,
        "vocab_size": config.vocab,
        "max_position_embeddings": config.max_length,
        "rms_norm_eps": config.eps,
        "tie_word_embeddings": config.tied,
        **described_rotary(config),
    }


def configure(settings: Settings) -> TransformerConfig:
    """Returns the configuration of a folder."""
    settings.only("hidden_act", "silu", ["swish"])
    settings.only("mlp_bias", False)
    bias = bool(settings.get("attention_bias", False))
    return TransformerConfig(**common(settings), mlp="swiglu", bias=bias)


def describe(config: Any) -> tuple[dict[str, Any], list[str]]:
    """Returns the settings of a model, and what keeps it from being of this family."""
    problems = misfits(config, f"{ROTARY} tied bias", mlp="swiglu")
    if problems:
        return {}, problems
    more = {"hidden_act": "silu", "attention_bias": config.bias, "mlp_bias": False}
    return {**described(config), **more}, problems


LLAMA = Family(
    name="llama",
    architecture="LlamaForCausalLM",
    configure=configure,
    describe=describe,
    parts=PARTS,
    make=transformer,
    prefix="model.",
    unused=UNUSED,
    tied=("lm_head.weight",),
)
