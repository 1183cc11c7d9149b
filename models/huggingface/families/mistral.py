"""Mistral (Jiang et al. 2023): Llama with a window in every layer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from meshdsl.models.configs import TransformerConfig
from meshdsl.models.huggingface.describing import misfits
from meshdsl.models.huggingface.families.llama import LLAMA, common, described
from meshdsl.models.huggingface.families.rotary import ROTARY
from meshdsl.models.huggingface.settings import Settings


def configure(settings: Settings) -> TransformerConfig:
    """Returns the configuration of a folder."""
    settings.only("hidden_act", "silu", ["swish"])
    settings.only("attention_bias", False)
    settings.only("layer_types", None)
    window = settings.whole("sliding_window", None)
    fields = common(settings, kv_heads=8, max_length=131072)
    return TransformerConfig(**fields, mlp="swiglu", window=window)


def describe(config: Any) -> tuple[dict[str, Any], list[str]]:
    """Returns the settings of a model, and what keeps it from being of this family."""
    problems = misfits(config, f"{ROTARY} tied window", mlp="swiglu")
    if problems:
        return {}, problems
    return {**described(config), "hidden_act": "silu", "sliding_window": config.window}, []


MISTRAL = replace(
    LLAMA,
    name="mistral",
    architecture="MistralForCausalLM",
    configure=configure,
    describe=describe,
)
