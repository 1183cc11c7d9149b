"""Gemma 1 and 2 (Gemma Team 2024): scaled embeddings, norms times 1 + scale, heads of any size.

Gemma 2 also normalises what layers add, caps scores softly, and has a window in every other layer.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from meshdsl.models.configs import TransformerConfig
from meshdsl.models.huggingface.describing import misfits
from meshdsl.models.huggingface.families.llama import (
    LAYER,
    LLAMA,
    PARTS,
    ROTARY,
    common,
    described,
)
from meshdsl.models.huggingface.families.windows import KINDS, layer_types, windows
from meshdsl.models.huggingface.placing import Part
from meshdsl.models.huggingface.settings import Settings

_GELU = {"gelu_pytorch_tanh": "geglu", "gelu_new": "geglu"}
_ALWAYS: dict[str, Any] = {"mlp": "geglu", "norm_unit_offset": True, "scaled_embedding": True}
NORMS = {
    "blocks/attention_added_norm/scale": Part(f"{LAYER}post_attention_layernorm.weight", "embed"),
    "blocks/mlp_norm/scale": Part(f"{LAYER}pre_feedforward_layernorm.weight", "embed"),
    "blocks/mlp_added_norm/scale": Part(f"{LAYER}post_feedforward_layernorm.weight", "embed"),
}


def _fields(settings: Settings) -> dict[str, Any]:
    """Returns the fields that Gemma 1 and 2 have alike."""
    settings.only("use_bidirectional_attention", False)
    name = "hidden_activation" if settings.values.get("hidden_activation") else "hidden_act"
    mlp = settings.choice(name, _GELU, "gelu_pytorch_tanh")
    bias = bool(settings.get("attention_bias", False))
    fields = common(settings, max_length=8192, kv=256, tied=True)
    return {**fields, **_ALWAYS, "mlp": mlp, "bias": bias}


def configure_1(settings: Settings) -> TransformerConfig:
    """Returns the configuration of a folder of Gemma 1."""
    return TransformerConfig(**_fields(settings))


def configure_2(settings: Settings) -> TransformerConfig:
    """Returns the configuration of a folder of Gemma 2."""
    settings.values = {"sliding_window": 4096, **settings.values}
    layers = settings.whole("num_hidden_layers")
    return TransformerConfig(
        **_fields(settings),
        **windows(settings, [KINDS[(layer + 1) % 2] for layer in range(layers)]),
        norm_order="both",
        query_scale=settings.number("query_pre_attn_scalar", 256) ** -0.5,
        attention_soft_cap=_cap(settings, "attn_logit_softcapping", 50.0),
        logit_soft_cap=_cap(settings, "final_logit_softcapping", 30.0),
    )


def _cap(settings: Settings, name: str, default: float) -> float | None:
    """Returns a soft cap; null is none, which differs from a missing setting."""
    missing = name in settings.values and settings.values[name] is None
    return None if missing else float(settings.number(name, default))


def describe_1(config: Any) -> tuple[dict[str, Any], list[str]]:
    """Returns the settings of a model, and what keeps it from being Gemma 1."""
    problems = misfits(config, f"{ROTARY} tied bias", **_ALWAYS)
    return ({}, problems) if problems else (_described(config), [])


def describe_2(config: Any) -> tuple[dict[str, Any], list[str]]:
    """Returns the settings of a model, and what keeps it from being Gemma 2."""
    free = "tied bias window window_pattern query_scale attention_soft_cap logit_soft_cap"
    problems = misfits(config, f"{ROTARY} {free}", norm_order="both", **_ALWAYS)
    if problems:
        return {}, problems
    scalar = config.kv_size if config.query_scale is None else config.query_scale**-2
    return {
        **_described(config),
        **layer_types(config),
        "query_pre_attn_scalar": round(scalar) if abs(scalar - round(scalar)) < 1e-6 else scalar,
        "attn_logit_softcapping": config.attention_soft_cap,
        "final_logit_softcapping": config.logit_soft_cap,
    }, []


def _described(config: TransformerConfig) -> dict[str, Any]:
    gelu = "gelu_pytorch_tanh"
    more = {"hidden_act": gelu, "hidden_activation": gelu, "attention_bias": config.bias}
    return {**described(config), **more}


GEMMA = replace(
    LLAMA,
    name="gemma",
    architecture="GemmaForCausalLM",
    configure=configure_1,
    describe=describe_1,
)
GEMMA2 = replace(
    LLAMA,
    name="gemma2",
    architecture="Gemma2ForCausalLM",
    configure=configure_2,
    describe=describe_2,
    parts={**PARTS, **NORMS},
)
