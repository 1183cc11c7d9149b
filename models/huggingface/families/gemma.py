"""Gemma 1 and 2 (Gemma Team 2024): scaled embeddings, norms times 1 + scale, heads of any size.

Gemma 2 also normalises what layers add, caps scores softly, and has a window in every other layer.
Gemma 3 (Gemma Team 2025) normalises queries and keys instead of caps, and turns faster in windows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from meshdsl.models.configs import TransformerConfig
from meshdsl.models.huggingface.describing import misfits
from meshdsl.models.huggingface.families.llama import (
    LAYER,
    LLAMA,
    PARTS,
    common,
    described,
)
from meshdsl.models.huggingface.families.qwen import NORMS as QUERY_KEY_NORMS
from meshdsl.models.huggingface.families.rotary import ROTARY
from meshdsl.models.huggingface.families.windows import KINDS, layer_types, windows
from meshdsl.models.huggingface.placing import Part
from meshdsl.models.huggingface.settings import Settings

_GELU = {"gelu_pytorch_tanh": "geglu", "gelu_new": "geglu"}
_ALWAYS: dict[str, Any] = {"mlp": "geglu", "norm_unit_offset": True, "scaled_embedding": True}
_OF_2 = f"{ROTARY} tied bias window window_pattern query_scale attention_soft_cap logit_soft_cap"
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


def configure_3(settings: Settings) -> TransformerConfig:
    """Returns the configuration of a folder of Gemma 3, without what sees images."""
    usual, of_window = _rotations(settings.values)
    inner = Settings(of_window)
    inner.only("rope_type", "default")
    base = inner.number("rope_theta", settings.number("rope_local_base_freq", 10000.0))
    settings.problems += [f"rope_parameters, sliding_attention: {one}" for one in inner.problems]
    defaults = {"sliding_window": 4096, "rope_theta": 1000000.0, "max_position_embeddings": 131072}
    settings.values = {**defaults, **settings.values, "rope_parameters": usual}
    settings.only("attn_logit_softcapping", None)
    layers, every = settings.whole("num_hidden_layers"), settings.whole("sliding_window_pattern", 6)
    kinds = windows(settings, [KINDS[(layer + 1) % every > 0] for layer in range(layers)])
    return TransformerConfig(
        **_fields(settings),
        **kinds,
        rotary_window_base=float(base) if kinds else None,
        norm_order="both",
        query_key_norm=True,
        query_scale=settings.number("query_pre_attn_scalar", 256) ** -0.5,
        logit_soft_cap=settings.number("final_logit_softcapping", None),
    )


def _rotations(values: Mapping[str, Any]) -> tuple[Any, Mapping[str, Any]]:
    """Returns the settings of rotations, and those in layers with a window."""
    own = values.get("rope_parameters")
    if not isinstance(own, Mapping) or not {*own} & {*KINDS}:
        return own, {}
    return own.get("full_attention"), own.get("sliding_attention") or {}


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
    problems = misfits(config, _OF_2, norm_order="both", **_ALWAYS)
    return ({}, problems) if problems else (_described_2(config), [])


def _described_2(config: TransformerConfig) -> dict[str, Any]:
    scalar = config.kv_size if config.query_scale is None else config.query_scale**-2
    return {
        **_described(config),
        **layer_types(config),
        # transformers wants a window even where no layer has it.
        "sliding_window": config.window or config.max_length,
        "query_pre_attn_scalar": round(scalar) if abs(scalar - round(scalar)) < 1e-6 else scalar,
        "attn_logit_softcapping": config.attention_soft_cap,
        "final_logit_softcapping": config.logit_soft_cap,
    }


def describe_3(config: Any) -> tuple[dict[str, Any], list[str]]:
    """Returns the settings of a model, and what keeps it from being Gemma 3."""
    free = f"{_OF_2} rotary_window_base".replace("attention_soft_cap ", "")
    problems = misfits(config, free, norm_order="both", query_key_norm=True, **_ALWAYS)
    if problems:
        return {}, problems
    base = config.rotary_window_base
    if config.window is not None and base is None and config.rotary_scaling != "none":
        problems.append("needs rotary_window_base: layers with a window turn as unscaled ones do")
    local = config.rotary_base if base is None else base
    return {**_described_2(config), "rope_local_base_freq": local}, problems


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
GEMMA3 = replace(
    GEMMA2,
    name="gemma3_text",
    architecture="Gemma3ForCausalLM",
    configure=configure_3,
    describe=describe_3,
    parts={**PARTS, **NORMS, **QUERY_KEY_NORMS},
)
