"""Qwen 2 and 3 (Yang et al. 2024, 2025): Llama with biases of q, k and v, or with their norms.

The last layers may have a window.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from meshdsl.models.configs import TransformerConfig
from meshdsl.models.huggingface.describing import misfits
from meshdsl.models.huggingface.families.llama import (
    ATTENTION,
    LLAMA,
    PARTS,
    common,
    described,
)
from meshdsl.models.huggingface.families.rotary import ROTARY
from meshdsl.models.huggingface.families.windows import layer_types, windows
from meshdsl.models.huggingface.placing import Part
from meshdsl.models.huggingface.settings import Settings

NORMS = {
    "blocks/attention/query_norm/scale": Part(f"{ATTENTION}q_norm.weight", "kv"),
    "blocks/attention/key_norm/scale": Part(f"{ATTENTION}k_norm.weight", "kv"),
}


def _window(settings: Settings) -> dict[str, Any]:
    if not settings.get("use_sliding_window", False):
        return {}
    first = settings.get("max_window_layers", 28)
    layers = settings.whole("num_hidden_layers")
    usual = ["full_attention"] * min(first, layers) + ["sliding_attention"] * (layers - first)
    return windows(settings, usual)


def configure_2(settings: Settings) -> TransformerConfig:
    """Returns the configuration of a folder of Qwen 2 and 2.5."""
    settings.only("hidden_act", "silu")
    fields = common(settings, max_length=32768) | _window(settings)
    return TransformerConfig(**fields, mlp="swiglu", qkv_bias=True)


def configure_3(settings: Settings) -> TransformerConfig:
    """Returns the configuration of a folder of Qwen 3."""
    settings.only("hidden_act", "silu")
    fields = common(settings, max_length=32768, kv=128) | _window(settings)
    bias = bool(settings.get("attention_bias", False))
    return TransformerConfig(**fields, mlp="swiglu", query_key_norm=True, bias=bias)


def describe_2(config: Any) -> tuple[dict[str, Any], list[str]]:
    """Returns the settings of a model, and what keeps it from being Qwen 2."""
    problems = misfits(config, f"{ROTARY} tied window window_pattern", mlp="swiglu", qkv_bias=True)
    if problems:
        return {}, problems
    if config.kv_size * config.heads != config.embed:
        problems.append("needs kv = embed / heads")
    return {**described(config), "hidden_act": "silu", **_windows_of(config)}, problems


def describe_3(config: Any) -> tuple[dict[str, Any], list[str]]:
    """Returns the settings of a model, and what keeps it from being Qwen 3."""
    free = f"{ROTARY} tied window window_pattern bias"
    problems = misfits(config, free, mlp="swiglu", query_key_norm=True)
    if problems:
        return {}, problems
    more = {"hidden_act": "silu", "attention_bias": config.bias}
    return {**described(config), **more, **_windows_of(config)}, []


def _windows_of(config: TransformerConfig) -> dict[str, Any]:
    return {"use_sliding_window": config.window is not None, **layer_types(config)}


QWEN2 = replace(
    LLAMA,
    name="qwen2",
    architecture="Qwen2ForCausalLM",
    configure=configure_2,
    describe=describe_2,
)
QWEN3 = replace(
    LLAMA,
    name="qwen3",
    architecture="Qwen3ForCausalLM",
    configure=configure_3,
    describe=describe_3,
    parts={**PARTS, **NORMS},
)
