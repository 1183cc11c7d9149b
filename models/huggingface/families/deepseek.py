"""DeepSeek-V2 and V3 (DeepSeek-AI 2024): latent attention, and experts after dense first layers.

Version 3 chooses experts by sigmoids and a bias that is balanced. Its layers beyond the last one,
which predict further tokens, are left out. Rotary features are stored by pairs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from meshdsl.models.configs import TransformerConfig
from meshdsl.models.huggingface.describing import misfits
from meshdsl.models.huggingface.families.llama import (
    ATTENTION,
    LAYER,
    LLAMA,
    MLP,
    NORMS,
    OUTER,
    described,
)
from meshdsl.models.huggingface.families.rotary import ROTARY, rotary
from meshdsl.models.huggingface.placing import Part
from meshdsl.models.huggingface.settings import Settings

_EPS = 1e-6  # of the norms of latent vectors, whatever the other norms have
_DOWN, _UP = f"{ATTENTION}kv_a_proj_with_mqa.weight", f"{ATTENTION}kv_b_proj.weight"
_LATENT = {
    "attention/query_down": Part(f"{ATTENTION}q_a_proj.weight", "query_rank, embed"),
    "attention/query_norm/scale": Part(f"{ATTENTION}q_a_layernorm.weight", "query_rank"),
    "attention/key_value_down": Part(_DOWN, "kv_rank, embed"),
    "attention/key_rotary": Part(_DOWN, "rotary_kv~, embed", ("kv_rank",)),
    "attention/key_value_norm/scale": Part(f"{ATTENTION}kv_a_layernorm.weight", "kv_rank"),
    "attention/key": Part(_UP, "heads *kv|kv, kv_rank"),
    "attention/value": Part(_UP, "heads kv|*kv, kv_rank"),
    "attention/out": Part(f"{ATTENTION}o_proj.weight", "embed, heads kv"),
}
_EXPERT, _GATE = f"{LAYER}mlp.experts.{{experts}}.", f"{LAYER}mlp.gate."
_SHARED = f"{LAYER}mlp.shared_experts."
_EXPERTS = {
    "mlp/router": Part(f"{_GATE}weight", "routed, embed"),
    "mlp/bias": Part(f"{_GATE}e_score_correction_bias", "routed"),
    "mlp/experts/w_gate": Part(f"{_EXPERT}gate_proj.weight", "d_ff, embed"),
    "mlp/experts/w_in": Part(f"{_EXPERT}up_proj.weight", "d_ff, embed"),
    "mlp/experts/w_out": Part(f"{_EXPERT}down_proj.weight", "embed, d_ff"),
    "mlp/shared/w_gate": Part(f"{_SHARED}gate_proj.weight", "d_ff, embed"),
    "mlp/shared/w_in": Part(f"{_SHARED}up_proj.weight", "d_ff, embed"),
    "mlp/shared/w_out": Part(f"{_SHARED}down_proj.weight", "embed, d_ff"),
}
_V3 = {"router_score": "sigmoid", "router_group_score": "top2", "router_bias": True}
_FREE = (
    f"{ROTARY} tied query_scale query_rank kv_rank rotary_kv experts experts_per_token "
    "shared_experts dense_layers dense_d_ff router_scale router_groups router_chosen_groups"
)


def _of_layers(config: TransformerConfig) -> Mapping[str, Part]:
    """Returns the parts of both stacks; the second begins after the dense layers."""
    full = "embed" if config.query_rank is None else "query_rank"
    name = f"{ATTENTION}{'q_proj' if config.query_rank is None else 'q_b_proj'}.weight"
    same = {
        **{path.removeprefix("blocks/"): part for path, part in NORMS.items()},
        **_LATENT,
        "attention/query": Part(name, f"heads *kv|rotary_kv, {full}"),
        "attention/query_rotary": Part(name, f"heads kv|*rotary_kv~, {full}"),
    }
    dense = {path.removeprefix("blocks/"): part for path, part in MLP.items()}
    first = config.dense_layers
    return {
        **{f"dense_blocks/{path}": part for path, part in {**same, **dense}.items()},
        **{
            f"blocks/{path}": replace(part, first=first)
            for path, part in {**same, **_EXPERTS}.items()
        },
    }


def _beyond(settings: Mapping[str, Any]) -> Sequence[str]:
    """Returns patterns of the layers beyond the last one, which predict further tokens."""
    last, more = settings["num_hidden_layers"], settings.get("num_nextn_predict_layers") or 0
    return [f"model.layers.{last + number}.*" for number in range(more)]


def configure_2(settings: Settings) -> TransformerConfig:
    """Returns the configuration of a folder of DeepSeek-V2."""
    settings.only("scoring_func", "softmax")
    settings.only("norm_topk_prob", False)
    limited = {"greedy": False, "group_limited_greedy": True}
    groups = settings.choice("topk_method", limited, "greedy")
    return _configured(settings, groups, router_normalise=False)


def configure_3(settings: Settings) -> TransformerConfig:
    """Returns the configuration of a folder of DeepSeek-V3 or R1."""
    settings.only("scoring_func", "sigmoid")
    settings.only("topk_method", "noaux_tc")
    settings.only("rope_interleave", True)
    normalise = bool(settings.get("norm_topk_prob", True))
    return _configured(settings, True, router_normalise=normalise, **_V3)


def _configured(settings: Settings, groups: bool, **fields: Any) -> TransformerConfig:
    settings.only("hidden_act", "silu")
    settings.only("attention_bias", False)
    settings.only("mlp_bias", False)
    settings.only("moe_layer_freq", 1)
    settings.only("rms_norm_eps", _EPS)
    heads, kv = settings.whole("num_attention_heads"), settings.whole("qk_nope_head_dim", 128)
    settings.only("num_key_value_heads", heads)
    settings.only("v_head_dim", kv)
    dense = settings.get("first_k_dense_replace", 0)
    turning = settings.whole("qk_rope_head_dim", 64)
    rotations = rotary(settings)
    # Null is a query of full rank, which differs from a missing setting.
    rank = settings.whole("q_lora_rank", 1536 if "q_lora_rank" not in settings.values else None)
    return TransformerConfig(
        layers=settings.whole("num_hidden_layers"),
        embed=settings.whole("hidden_size"),
        heads=heads,
        vocab=settings.whole("vocab_size"),
        max_length=settings.whole("max_position_embeddings", 2048),
        kv=kv,
        d_ff=settings.whole("moe_intermediate_size"),
        norm_eps=_EPS,
        **rotations,
        attention="latent",
        query_scale=_scale(settings, kv + turning, rotations),
        query_rank=rank,
        kv_rank=settings.whole("kv_lora_rank", 512),
        rotary_kv=turning,
        mlp="swiglu",
        experts=settings.whole("n_routed_experts"),
        experts_per_token=settings.whole("num_experts_per_tok"),
        shared_experts=settings.whole("n_shared_experts"),
        dispatch="sort",
        dense_layers=dense,
        dense_d_ff=settings.whole("intermediate_size") if dense else None,
        router_scale=float(settings.number("routed_scaling_factor", 1.0)),
        router_groups=settings.whole("n_group", 1) if groups else 1,
        router_chosen_groups=settings.whole("topk_group", 1) if groups else 1,
        balance_weight=float(settings.number("aux_loss_alpha", 0.001)),
        router_z_weight=0.0,
        tied=bool(settings.get("tie_word_embeddings", False)),
        **fields,
    )


def _scale(settings: Settings, features: int, rotations: Mapping[str, Any]) -> float | None:
    """Returns what scores are multiplied by: yarn may sharpen those of all features."""
    values = settings.get("rope_parameters", None) or settings.get("rope_scaling", None) or {}
    share = Settings(values).number("mscale_all_dim", 0) if isinstance(values, Mapping) else 0
    if not share or "rotary_scaling" not in rotations:
        return None
    return _sharper(share, rotations["rotary_factor"]) ** 2 * float(features) ** -0.5


def _sharper(share: float, factor: float) -> float:
    return 0.1 * share * math.log(max(factor, 1.0)) + 1


def describe_2(config: Any) -> tuple[dict[str, Any], list[str]]:
    """Returns the settings of a model, and what keeps it from being DeepSeek-V2."""
    settings, problems = _described(config, _FREE, router_normalise=False)
    if not problems:
        greedy = config.router_groups == 1
        settings["topk_method"] = "greedy" if greedy else "group_limited_greedy"
        settings |= {"scoring_func": "softmax", "norm_topk_prob": False}
    return settings, problems


def describe_3(config: Any) -> tuple[dict[str, Any], list[str]]:
    """Returns the settings of a model, and what keeps it from being DeepSeek-V3."""
    settings, problems = _described(config, f"{_FREE} router_normalise", **_V3)
    if not problems:
        settings |= {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}
        settings |= {"norm_topk_prob": config.router_normalise, "num_nextn_predict_layers": 0}
    return settings, problems


def _described(config: Any, free: str, **fixed: Any) -> tuple[dict[str, Any], list[str]]:
    problems = misfits(config, free, mlp="swiglu", attention="latent", **fixed)
    if not problems:
        problems = [
            f"needs {name} of at least 1"
            for name in ("experts", "shared_experts")
            if not getattr(config, name)
        ]
    if problems:
        return {}, problems
    if config.eps != _EPS:
        problems.append(f"needs norm_eps={_EPS:g}, not {config.eps:g}")
    settings = {
        **described(config),
        "hidden_act": "silu",
        "attention_bias": False,
        "intermediate_size": config.dense_d_ff_size,
        "moe_intermediate_size": config.d_ff_size,
        "qk_nope_head_dim": config.kv_size,
        "v_head_dim": config.kv_size,
        "qk_rope_head_dim": config.rotary_kv_size,
        "q_lora_rank": config.query_rank,
        "kv_lora_rank": config.kv_rank_size,
        "n_routed_experts": config.experts,
        "num_experts_per_tok": config.experts_per_token,
        "n_shared_experts": config.shared_experts,
        "first_k_dense_replace": config.dense_layers,
        "moe_layer_freq": 1,
        "routed_scaling_factor": config.router_scale,
        "n_group": config.router_groups,
        "topk_group": config.router_chosen_groups,
        "aux_loss_alpha": config.balance_weight,
    }
    del settings["head_dim"]  # that of positions alone, for transformers
    return settings, [*problems, *_with_scale(settings, config)]


def _with_scale(settings: dict[str, Any], config: TransformerConfig) -> list[str]:
    """Adds the setting of a scale of scores; returns what keeps it from being one."""
    if config.query_scale is None:
        return []
    features, factor = config.kv_size + config.rotary_kv_size, config.rotary_factor
    if config.rotary_scaling != "yarn" or factor <= 1:
        return ["needs no query_scale, but with yarn"]
    sharper = math.sqrt(config.query_scale * math.sqrt(features))
    share = _share(sharper, factor)
    if share <= 0:
        return [f"needs query_scale above {features**-0.5:g}"]
    assert config.scaling is not None
    scaling, size = settings["rope_scaling"], config.scaling.size
    scaling["mscale_all_dim"] = share
    # transformers and vLLM take the size of cosine and sine from both shares. vLLM sharpens no
    # scores where it finds an `attention_factor` of 1.
    both = _share(sharper * size, factor)
    if both > 0:
        scaling.pop("attention_factor", None)
        scaling["mscale"] = both
    else:
        scaling["attention_factor"] = size
    return []


def _share(sharper: float, factor: float) -> float:
    """Returns the share of `_sharper`."""
    return round((sharper - 1) / (0.1 * math.log(factor)), 9)


DEEPSEEK2 = replace(
    LLAMA,
    name="deepseek_v2",
    architecture="DeepseekV2ForCausalLM",
    configure=configure_2,
    describe=describe_2,
    parts=OUTER,
    more=_of_layers,
    beyond=_beyond,
)
DEEPSEEK3 = replace(
    DEEPSEEK2,
    name="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    configure=configure_3,
    describe=describe_3,
)
