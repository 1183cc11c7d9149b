"""Phi-3 (Abdin et al. 2024): Llama with q, k, v in one tensor, and gate and up in another."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from meshdsl.models.configs import TransformerConfig
from meshdsl.models.huggingface.describing import misfits
from meshdsl.models.huggingface.families.llama import (
    ATTENTION,
    LAYER,
    LLAMA,
    PARTS,
    common,
    described,
)
from meshdsl.models.huggingface.placing import Part
from meshdsl.models.huggingface.settings import Settings

_QKV, _GATE_UP = f"{ATTENTION}qkv_proj.weight", f"{LAYER}mlp.gate_up_proj.weight"
FUSED = {
    "blocks/attention/query": Part(_QKV, "heads group kv, embed"),
    "blocks/attention/key": Part(_QKV, "heads kv, embed", ("heads group kv",)),
    "blocks/attention/value": Part(_QKV, "heads kv, embed", ("heads group kv", "heads kv")),
    "blocks/mlp/w_gate": Part(_GATE_UP, "d_ff, embed"),
    "blocks/mlp/w_in": Part(_GATE_UP, "d_ff, embed", ("d_ff",)),
}


def configure(settings: Settings) -> TransformerConfig:
    """Returns the configuration of a folder."""
    settings.only("hidden_act", "silu")
    window = settings.whole("sliding_window", None)
    fields = common(settings, max_length=4096, norm_eps=1e-5)
    if fields.get("rotary_scaling", "none") != "none":
        settings.problems.append(f"rope_type={fields['rotary_scaling']!r}: Phi-3 has none of this")
    return TransformerConfig(**fields, mlp="swiglu", window=window)


def describe(config: Any) -> tuple[dict[str, Any], list[str]]:
    """Returns the settings of a model, and what keeps it from being of this family."""
    problems = misfits(config, "rotary_base tied window", mlp="swiglu")
    if problems:
        return {}, problems
    if config.kv_size * config.heads != config.embed:
        problems.append("needs kv = embed / heads")
    more = {
        "hidden_act": "silu",
        "sliding_window": config.window,
        "original_max_position_embeddings": config.max_length,
        "pad_token_id": None,
    }
    return {**described(config), **more}, problems


PHI3 = replace(
    LLAMA,
    name="phi3",
    architecture="Phi3ForCausalLM",
    configure=configure,
    describe=describe,
    parts={**PARTS, **FUSED},
)
