"""GPT-2 (Radford et al. 2019): projections are stored as [in, out], with q, k, v in one tensor."""

from __future__ import annotations

from typing import Any

from meshdsl.models.configs import TransformerConfig
from meshdsl.models.huggingface.describing import misfits
from meshdsl.models.huggingface.family import Family
from meshdsl.models.huggingface.placing import Part
from meshdsl.models.huggingface.settings import Settings
from meshdsl.models.transformer import transformer

_LAYER = "transformer.h.{layers}."
_ATTENTION, _ONE = f"{_LAYER}attn.", "heads group kv"
ACTIVATIONS = {
    "gelu_new": "gelu",
    "gelu_pytorch_tanh": "gelu",
    "relu": "relu",
    "gelu": "exact_gelu",
}


def _qkv(kind: str, axes: str, number: int, along: int) -> Part:
    return Part(f"{_ATTENTION}c_attn.{kind}", axes, (_ONE,) * number, along)


PARTS = {
    "embedding": Part("transformer.wte.weight", "vocab, embed"),
    "positions": Part("transformer.wpe.weight", "max_length, embed"),
    "final_norm/scale": Part("transformer.ln_f.weight", "embed"),
    "final_norm/bias": Part("transformer.ln_f.bias", "embed"),
    "unembedding": Part("lm_head.weight", "vocab, embed"),
    "blocks/attention_norm/scale": Part(f"{_LAYER}ln_1.weight", "embed"),
    "blocks/attention_norm/bias": Part(f"{_LAYER}ln_1.bias", "embed"),
    "blocks/attention/query": _qkv("weight", "embed, heads group kv", 0, 1),
    "blocks/attention/key": _qkv("weight", "embed, heads kv", 1, 1),
    "blocks/attention/value": _qkv("weight", "embed, heads kv", 2, 1),
    "blocks/attention/query_bias": _qkv("bias", "heads group kv", 0, 0),
    "blocks/attention/key_bias": _qkv("bias", "heads kv", 1, 0),
    "blocks/attention/value_bias": _qkv("bias", "heads kv", 2, 0),
    "blocks/attention/out": Part(f"{_ATTENTION}c_proj.weight", "heads group kv, embed"),
    "blocks/attention/out_bias": Part(f"{_ATTENTION}c_proj.bias", "embed"),
    "blocks/mlp_norm/scale": Part(f"{_LAYER}ln_2.weight", "embed"),
    "blocks/mlp_norm/bias": Part(f"{_LAYER}ln_2.bias", "embed"),
    "blocks/mlp/w_in": Part(f"{_LAYER}mlp.c_fc.weight", "embed, d_ff"),
    "blocks/mlp/bias_in": Part(f"{_LAYER}mlp.c_fc.bias", "d_ff"),
    "blocks/mlp/w_out": Part(f"{_LAYER}mlp.c_proj.weight", "d_ff, embed"),
    "blocks/mlp/bias_out": Part(f"{_LAYER}mlp.c_proj.bias", "embed"),
}


def configure(settings: Settings) -> TransformerConfig:
    """Returns the configuration of a folder."""
    settings.only("scale_attn_weights", True)
    settings.only("scale_attn_by_inverse_layer_idx", False)
    settings.only("add_cross_attention", False)
    embed = settings.whole("n_embd", 768)
    return TransformerConfig(
        layers=settings.whole("n_layer", 12),
        embed=embed,
        heads=settings.whole("n_head", 12),
        vocab=settings.whole("vocab_size", 50257),
        max_length=settings.whole("n_positions", 1024),
        d_ff=settings.whole("n_inner", 4 * embed),
        norm="layer",
        norm_eps=settings.number("layer_norm_epsilon", 1e-5),
        positions="learned",
        mlp=settings.choice("activation_function", ACTIVATIONS, "gelu_new"),
        bias=True,
        tied=settings.get("tie_word_embeddings", True),
    )


def activation_of(config: TransformerConfig) -> str:
    """Returns the name of an activation."""
    return next(name for name, mlp in ACTIVATIONS.items() if mlp == config.mlp or config.gated)


def describe(config: Any) -> tuple[dict[str, Any], list[str]]:
    """Returns the settings of a model, and what keeps it from being of this family."""
    problems = misfits(config, "mlp tied", norm="layer", positions="learned", bias=True)
    if problems:
        return {}, problems
    if config.gated:
        problems.append(f"needs mlp=gelu, exact_gelu or relu, not {config.mlp}")
    if config.kv_size * config.heads != config.embed:
        problems.append("needs kv = embed / heads")
    if config.kv_heads_size != config.heads:
        problems.append("needs keys for every head: no kv_heads")
    return {
        "n_layer": config.layers,
        "n_embd": config.embed,
        "n_head": config.heads,
        "n_inner": config.d_ff_size,
        "n_positions": config.max_length,
        "n_ctx": config.max_length,
        "vocab_size": config.vocab,
        "layer_norm_epsilon": config.eps,
        "activation_function": activation_of(config),
        "tie_word_embeddings": config.tied,
    }, problems


GPT2 = Family(
    name="gpt2",
    architecture="GPT2LMHeadModel",
    configure=configure,
    describe=describe,
    parts=PARTS,
    make=transformer,
    prefix="transformer.",
    unused=("*.attn.bias", "*.attn.masked_bias"),
    tied=("lm_head.weight",),
)
