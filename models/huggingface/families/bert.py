"""BERT (Devlin et al. 2019) and RoBERTa (Liu et al. 2019): encoders with a head for masked tokens.

RoBERTa differs in names and in where positions start: its table has rows for pads in front. What
BERT has to tell the next sentence, `cls.seq_relationship`, is left out.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from meshdsl.models.bert import BertConfig, bert
from meshdsl.models.huggingface.describing import misfits
from meshdsl.models.huggingface.families.gpt2 import ACTIVATIONS, activation_of
from meshdsl.models.huggingface.family import Family
from meshdsl.models.huggingface.placing import Part
from meshdsl.models.huggingface.settings import Settings

_ALWAYS: dict[str, Any] = {
    "norm": "layer",
    "norm_order": "post",
    "positions": "learned",
    "bias": True,
}
_FREE = "mlp segments pooler mask_token chosen"
_WITH_POOLER = "BertForPreTraining"


def _norm(path: str, name: str) -> dict[str, Part]:
    kinds = {"scale": "weight", "bias": "bias"}
    return {f"{path}/{own}": Part(f"{name}.{kind}", "embed") for own, kind in kinds.items()}


def _linear(path: str, bias: str, name: str, into: str, out: str) -> dict[str, Part]:
    return {path: Part(f"{name}.weight", f"{out}, {into}"), bias: Part(f"{name}.bias", out)}


def _body(prefix: str) -> dict[str, Part]:
    """Returns the parts of all but the head."""
    embeddings, layer = f"{prefix}embeddings.", f"{prefix}encoder.layer.{{layers}}."
    parts = {
        "embedding": Part(f"{embeddings}word_embeddings.weight", "vocab, embed"),
        "positions": Part(f"{embeddings}position_embeddings.weight", "max_length, embed"),
        "segments": Part(f"{embeddings}token_type_embeddings.weight", "segments, embed"),
        **_norm("embedding_norm", f"{embeddings}LayerNorm"),
    }
    own, theirs = "blocks/attention/", f"{layer}attention."
    for name in ("query", "key", "value"):
        projection = f"{theirs}self.{name}"
        parts |= _linear(f"{own}{name}", f"{own}{name}_bias", projection, "embed", "heads kv")
    own_mlp = "blocks/mlp/"
    return {
        **parts,
        **_linear(f"{own}out", f"{own}out_bias", f"{theirs}output.dense", "heads kv", "embed"),
        **_norm("blocks/attention_norm", f"{theirs}output.LayerNorm"),
        **_linear(
            f"{own_mlp}w_in", f"{own_mlp}bias_in", f"{layer}intermediate.dense", "embed", "d_ff"
        ),
        **_linear(f"{own_mlp}w_out", f"{own_mlp}bias_out", f"{layer}output.dense", "d_ff", "embed"),
        **_norm("blocks/mlp_norm", f"{layer}output.LayerNorm"),
    }


def _head(dense: str, norm: str, bias: str) -> dict[str, Part]:
    return {
        "head/weight": Part(f"{dense}.weight", "transformed, embed"),
        "head/bias": Part(f"{dense}.bias", "embed"),
        **_norm("head/norm", norm),
        "head/out_bias": Part(bias, "vocab"),
    }


PARTS = {
    **_body("bert."),
    **_linear("pooler/weight", "pooler/bias", "bert.pooler.dense", "embed", "pooled"),
    **_head(
        "cls.predictions.transform.dense",
        "cls.predictions.transform.LayerNorm",
        "cls.predictions.bias",
    ),
}
ROBERTA_PARTS = {
    **_body("roberta."),
    **_head("lm_head.dense", "lm_head.layer_norm", "lm_head.bias"),
}


def _common(settings: Settings, mask: int, **fields: Any) -> BertConfig:
    settings.only("is_decoder", False)
    settings.only("add_cross_attention", False)
    settings.only("position_embedding_type", "absolute")
    settings.only("tie_word_embeddings", True)
    vocab = settings.whole("vocab_size", 30522)
    token = settings.token("[MASK]", "<mask>")
    return BertConfig(
        layers=settings.whole("num_hidden_layers", 12),
        embed=settings.whole("hidden_size", 768),
        heads=settings.whole("num_attention_heads", 12),
        vocab=vocab,
        max_length=settings.whole("max_position_embeddings", 512),
        d_ff=settings.whole("intermediate_size", 3072),
        norm_eps=settings.number("layer_norm_eps", 1e-12),
        segments=settings.whole("type_vocab_size", 2),
        mask_token=min(mask, vocab - 1) if token is None else token,
        **_ALWAYS,
        **fields,
    )


def configure(settings: Settings) -> BertConfig:
    """Returns the configuration of a folder of BERT.

    The token of masks is that of the folder's tokenizer; without one, that of the paper's models.
    """
    mlp = settings.choice("hidden_act", ACTIVATIONS, "gelu")
    pooler = _WITH_POOLER in settings.get("architectures", [])
    return _common(settings, mask=103, mlp=mlp, pooler=pooler)


def configure_roberta(settings: Settings) -> BertConfig:
    """Returns the configuration of a folder of RoBERTa."""
    settings.only("hidden_act", "gelu")  # which the head has, whatever the layers have
    pad = settings.get("pad_token_id", 1)
    if isinstance(pad, bool) or not isinstance(pad, int) or pad < 0:
        settings.problems.append(f"pad_token_id={pad!r}: needs a token; positions start after it")
        pad = 1
    fields = {"mlp": "exact_gelu", "pooler": False, "first_position": pad + 1}
    return _common(settings, mask=50264, **fields)


def describe(config: Any) -> tuple[dict[str, Any], list[str]]:
    """Returns the settings of a model, and what keeps it from being BERT."""
    settings, problems = _described(config)
    if not problems and config.pooler:
        settings["architectures"] = [_WITH_POOLER]
    return settings, problems


def describe_roberta(config: Any) -> tuple[dict[str, Any], list[str]]:
    """Returns the settings of a model, and what keeps it from being RoBERTa."""
    first = config.first_position if isinstance(config, BertConfig) else 0
    settings, problems = _described(config, "first_position", mlp="exact_gelu", pooler=False)
    if not problems and not first:
        problems.append("needs first_position of at least 1: positions start after that of pads")
    return {**settings, "pad_token_id": first - 1}, problems


def _described(config: Any, free: str = "", **fixed: Any) -> tuple[dict[str, Any], list[str]]:
    others = " ".join(name for name in _FREE.split() if name not in fixed)
    problems = misfits(config, f"{others} {free}", BertConfig, **{**_ALWAYS, **fixed})
    if problems:
        return {}, problems
    if config.gated:
        problems.append(f"needs mlp=gelu, exact_gelu or relu, not {config.mlp}")
    if config.kv_size * config.heads != config.embed:
        problems.append("needs kv = embed / heads")
    if config.kv_heads_size != config.heads:
        problems.append("needs keys for every head: no kv_heads")
    if not config.segments:
        problems.append("needs segments of at least 1")
    return {
        "num_hidden_layers": config.layers,
        "hidden_size": config.embed,
        "num_attention_heads": config.heads,
        "intermediate_size": config.d_ff_size,
        "vocab_size": config.vocab,
        "max_position_embeddings": config.max_length,
        "type_vocab_size": config.segments,
        "layer_norm_eps": config.eps,
        "hidden_act": activation_of(config),
        "position_embedding_type": "absolute",
    }, problems


BERT = Family(
    name="bert",
    architecture="BertForMaskedLM",
    configure=configure,
    describe=describe,
    parts=PARTS,
    make=bert,
    prefix="bert.",
    unused=("*.position_ids", "*.pooler.dense.*", "pooler.dense.*", "cls.seq_relationship.*"),
    tied=("cls.predictions.decoder.weight", "cls.predictions.decoder.bias"),
    renamed=((".gamma", ".weight"), (".beta", ".bias")),
)
ROBERTA = replace(
    BERT,
    name="roberta",
    architecture="RobertaForMaskedLM",
    configure=configure_roberta,
    describe=describe_roberta,
    parts=ROBERTA_PARTS,
    prefix="roberta.",
    tied=("lm_head.decoder.weight", "lm_head.decoder.bias"),
)
XLM_ROBERTA = replace(ROBERTA, name="xlm-roberta", architecture="XLMRobertaForMaskedLM")
