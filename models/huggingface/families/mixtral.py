"""Mixtral (Jiang et al. 2024): Mistral with experts, each of which has tensors of its own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from meshdsl.models.configs import TransformerConfig
from meshdsl.models.huggingface.describing import misfits
from meshdsl.models.huggingface.families.llama import (
    LAYER,
    LLAMA,
    NORMS,
    OUTER,
    PROJECTIONS,
    common,
    described,
)
from meshdsl.models.huggingface.families.rotary import ROTARY
from meshdsl.models.huggingface.placing import Part
from meshdsl.models.huggingface.settings import Settings

_EXPERT = f"{LAYER}block_sparse_moe.experts.{{experts}}."
EXPERTS = {
    "blocks/mlp/router": Part(f"{LAYER}block_sparse_moe.gate.weight", "routed, embed"),
    "blocks/mlp/experts/w_gate": Part(f"{_EXPERT}w1.weight", "d_ff, embed"),
    "blocks/mlp/experts/w_out": Part(f"{_EXPERT}w2.weight", "embed, d_ff"),
    "blocks/mlp/experts/w_in": Part(f"{_EXPERT}w3.weight", "d_ff, embed"),
}


def configure(settings: Settings) -> TransformerConfig:
    """Returns the configuration of a folder; nothing is dropped."""
    settings.only("hidden_act", "silu", ["swish"])
    settings.only("router_jitter_noise", 0, [0.0])
    return TransformerConfig(
        **common(settings, kv_heads=8, max_length=131072, norm_eps=1e-5),
        mlp="swiglu",
        window=settings.whole("sliding_window", None),
        experts=settings.whole("num_local_experts", 8),
        experts_per_token=settings.whole("num_experts_per_tok", 2),
        balance_weight=settings.number("router_aux_loss_coef", 0.001),
        router_z_weight=0.0,
        dispatch="sort",
    )


def describe(config: Any) -> tuple[dict[str, Any], list[str]]:
    """Returns the settings of a model, and what keeps it from being of this family."""
    free = f"{ROTARY} tied window experts experts_per_token"
    problems = misfits(config, free, mlp="swiglu")
    if not problems and not config.experts:
        problems.append("needs experts")
    if problems:
        return {}, problems
    return {
        **described(config),
        "hidden_act": "silu",
        "sliding_window": config.window,
        "num_local_experts": config.experts,
        "num_experts_per_tok": config.experts_per_token,
        "router_aux_loss_coef": config.balance_weight,
    }, []


MIXTRAL = replace(
    LLAMA,
    name="mixtral",
    architecture="MixtralForCausalLM",
    configure=configure,
    describe=describe,
    parts={**OUTER, **NORMS, **PROJECTIONS, **EXPERTS},
)
