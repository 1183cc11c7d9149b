"""Phi-3 (Abdin et al. 2024): Llama with q, k, v in one tensor, and gate and up in another.

Models of 128k positions turn by `longrope`.
"""

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
from meshdsl.models.huggingface.families.rotary import ROTARY
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
    if fields.get("rotary_scaling", "none") not in ("none", "longrope"):
        settings.problems.append(f"rope_type={fields['rotary_scaling']!r}: Phi-3 has none of this")
    return TransformerConfig(**fields, mlp="swiglu", window=window)


def describe(config: Any) -> tuple[dict[str, Any], list[str]]:
    """Returns the settings of a model, and what keeps it from being of this family."""
    problems = misfits(config, f"{ROTARY} tied window", mlp="swiglu")
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
    if config.rotary_scaling == "longrope":
        factor, original = config.rotary_factor, config.rotary_original
        if factor != config.max_length / original or config.rotary_magnitude is not None:
            problems.append(
                "needs rotary_factor = max_length / rotary_original and no rotary_magnitude"
            )
        # Without the other settings, for transformers 4 checks that there are these three.
        scaling = {
            "type": "longrope",
            "short_factor": list(config.rotary_short),
            "long_factor": list(config.rotary_long),
        }
        more |= {"rope_scaling": scaling, "original_max_position_embeddings": original}
    elif config.rotary_scaling != "none":
        problems.append(f"needs rotary_scaling=none or longrope, not {config.rotary_scaling}")
    return {**described(config), **more}, problems


PHI3 = replace(
    LLAMA,
    name="phi3",
    architecture="Phi3ForCausalLM",
    configure=configure,
    describe=describe,
    parts={**PARTS, **FUSED},
)
