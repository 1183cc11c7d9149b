"""Folders that `transformers` has written, and that it reads: logits, gradients and weights.

It is the independent judge, on the CPU with random weights. Without it, these tests are skipped:
`test_references.py` has the formulas of the papers, for every machine.
"""

import numpy as np
import pytest

import meshdsl as md
from meshdsl import models, nn
from meshdsl.generation import Sampling, Writer
from meshdsl.models import bert
from meshdsl.training.checkpointing.weights import load_weights
from meshdsl.training.state import by_path, spec_of
from tests.models.huggingface.folders import (
    DEEPSEEK,
    ENCODER,
    LLAMA3,
    LONG,
    SIZES,
    SOURCE,
    T5_SIZES,
    YARN,
    scores_of,
    tensors_of,
    write_back,
)

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

GEMMA2 = {
    "head_dim": 8,
    "sliding_window": 5,
    "query_pre_attn_scalar": 5,
    "attn_logit_softcapping": 2.0,
    "final_logit_softcapping": 3.0,
}
GEMMA3 = {
    "head_dim": 8,
    "sliding_window": 4,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "query_pre_attn_scalar": 5,
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "rope_theta": 1000.0, "factor": 4.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10.0},
    },
}
OWN_HEAD = {"tie_word_embeddings": False}
ROTARY = {"rope_type": "default", "rope_theta": 100.0}


def turning(scaling):
    return {"rope_parameters": {"rope_theta": 100.0, **scaling}}


CASES = {
    "gpt2": ("GPT2Config", {"n_layer": 3, "n_embd": 24, "n_head": 6, "n_positions": 32}),
    "gpt2, wide, untied": (
        "GPT2Config",
        {
            "n_layer": 2,
            "n_embd": 24,
            "n_head": 4,
            "n_positions": 32,
            "n_inner": 56,
            "tie_word_embeddings": False,
            "layer_norm_epsilon": 1e-3,
        },
    ),
    "llama 2": ("LlamaConfig", SIZES),
    "llama 3.1": ("LlamaConfig", {**SIZES, "rope_parameters": {**LLAMA3, "rope_theta": 100.0}}),
    "llama, linear, biases, tied": (
        "LlamaConfig",
        {
            **SIZES,
            "head_dim": 8,
            "attention_bias": True,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "linear", "rope_theta": 100.0, "factor": 2.0},
        },
    ),
    "llama, yarn": ("LlamaConfig", {**SIZES, **turning(YARN), "head_dim": 16}),
    "llama, yarn with mscale": (
        "LlamaConfig",
        {**SIZES, **turning({**YARN, "mscale": 0.7, "mscale_all_dim": 1.5, "beta_fast": 32.0})},
    ),
    "llama, dynamic": (
        "LlamaConfig",
        {
            **SIZES,
            **turning({"rope_type": "dynamic", "factor": 3.0}),
            "max_position_embeddings": 12,
        },
    ),
    "llama, dynamic, short text": (
        "LlamaConfig",
        {**SIZES, **turning({"rope_type": "dynamic", "factor": 3.0})},
    ),
    "llama, longrope": ("LlamaConfig", {**SIZES, **turning(LONG), "head_dim": 8}),
    "qwen2, longrope, short text": (
        "Qwen2Config",
        {
            **SIZES,
            **turning({**LONG, "original_max_position_embeddings": 19, "attention_factor": 1.5}),
            "head_dim": 8,
            "num_attention_heads": 3,
            "num_key_value_heads": 3,
        },
    ),
    "phi3, 128k": (
        "Phi3Config",
        {
            **SIZES,
            **turning({n: v for n, v in LONG.items() if "factor" in n or n == "rope_type"}),
            "original_max_position_embeddings": 16,
            "num_attention_heads": 3,
            "num_key_value_heads": 3,
        },
    ),
    "mistral": ("MistralConfig", {**SIZES, "sliding_window": 5, "head_dim": 8}),
    "qwen2": ("Qwen2Config", {**SIZES, "tie_word_embeddings": True}),
    "qwen2, last layers with a window": (
        "Qwen2Config",
        {**SIZES, "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3Config", {**SIZES, "head_dim": 8, "rope_parameters": ROTARY}),
    "mixtral": (
        "MixtralConfig",
        {**SIZES, "num_local_experts": 4, "num_experts_per_tok": 2, "tie_word_embeddings": True},
    ),
    "gemma": ("GemmaConfig", {**SIZES, "head_dim": 8}),
    "gemma2": ("Gemma2Config", {**SIZES, **GEMMA2}),
    "gemma3": ("Gemma3TextConfig", {**SIZES, **GEMMA3}),
    "gemma3, all layers with a window": (
        "Gemma3TextConfig",
        {**SIZES, "head_dim": 8, "sliding_window": 5, "layer_types": ["sliding_attention"] * 3},
    ),
    "gemma3, no windows, soft cap": (
        "Gemma3TextConfig",
        {
            **SIZES,
            "head_dim": 8,
            "layer_types": ["full_attention"] * 3,
            "final_logit_softcapping": 3.0,
            "attention_bias": True,
        },
    ),
    "phi3": ("Phi3Config", SIZES),
    "phi3, window": ("Phi3Config", {**SIZES, "sliding_window": 5, "tie_word_embeddings": True}),
    "qwen3, biases": ("Qwen3Config", {**SIZES, "head_dim": 4, "attention_bias": True}),
    "deepseek_v2": ("DeepseekV2Config", {**DEEPSEEK, "q_lora_rank": None}),
    "deepseek_v2, groups": (
        "DeepseekV2Config",
        {
            **DEEPSEEK,
            "topk_method": "group_limited_greedy",
            "routed_scaling_factor": 3.0,
            **turning({**YARN, "mscale": 0.707, "mscale_all_dim": 0.707}),
        },
    ),
    "deepseek_v3": (
        "DeepseekV3Config",
        {
            **DEEPSEEK,
            "first_k_dense_replace": 2,
            **turning({**YARN, "mscale": 0.5, "mscale_all_dim": 1.0}),
        },
    ),
    "deepseek_v3, no dense layers": (
        "DeepseekV3Config",
        {**DEEPSEEK, "q_lora_rank": None, "first_k_dense_replace": 0, "norm_topk_prob": False},
    ),
    "t5": ("T5Config", T5_SIZES),
    "t5 v1.1": ("T5Config", {**T5_SIZES, **OWN_HEAD, "feed_forward_proj": "gated-gelu"}),
    "t5, silu": ("T5Config", {**T5_SIZES, **OWN_HEAD, "feed_forward_proj": "gated-silu"}),
    "t5, gelu": ("T5Config", {**T5_SIZES, "feed_forward_proj": "gelu"}),
    "mt5": ("MT5Config", {**T5_SIZES, **OWN_HEAD}),
    "bert": ("BertConfig", {**ENCODER, "type_vocab_size": 3}),
    "bert, gelu_new": ("BertConfig", {**ENCODER, "hidden_act": "gelu_new", "layer_norm_eps": 1e-3}),
    "roberta": ("RobertaConfig", {**ENCODER, "pad_token_id": 1, "type_vocab_size": 1}),
    "xlm-roberta": ("XLMRobertaConfig", {**ENCODER, "pad_token_id": 1, "type_vocab_size": 1}),
    "roberta, segments": ("RobertaConfig", {**ENCODER, "pad_token_id": 4, "type_vocab_size": 2}),
}
MASKED = ("BertConfig", "RobertaConfig", "XLMRobertaConfig")
CAUSAL = transformers.AutoModelForCausalLM
HEADS = {name: transformers.AutoModelForMaskedLM for name in MASKED}
HEADS |= {name: transformers.AutoModelForSeq2SeqLM for name in ("T5Config", "MT5Config")}
VOCAB = 67


def theirs(kind, settings, folder):
    """Returns a model of transformers with random weights, saved to a folder."""
    torch.manual_seed(0)
    special = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None}
    config = getattr(transformers, kind)(**{"vocab_size": VOCAB, **special, **settings})
    model = HEADS.get(kind, CAUSAL).from_config(config, attn_implementation="eager")
    if "T5" in kind and settings.get("tie_word_embeddings") is False:  # transformers 5 ties anyway
        own = 0.1 * torch.randn_like(model.lm_head.weight)
        model.lm_head.weight = torch.nn.Parameter(own)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
        for buffer in biases_of_routers(model).values():
            buffer.add_(0.1 * torch.randn_like(buffer))
    model.eval().save_pretrained(folder)
    return model


def biases_of_routers(model):
    """Returns what decides with the scores who is chosen; it has no gradient."""
    return {n: each for n, each in model.named_buffers() if n.endswith("correction_bias")}


def scored(model, tokens):
    """Returns their scores; an encoder reads what `scores_of` gives ours."""
    if not model.config.is_encoder_decoder:
        return model(tokens).logits
    return model(input_ids=tokens[:, SOURCE], decoder_input_ids=tokens).logits


def far(a, b, floor=0.0):
    return np.max(np.abs(a - b)) / max(np.max(np.abs(b)), floor)


@pytest.mark.parametrize("case", CASES)
def test_logits_and_gradients_are_those_of_transformers(case, tmp_path):
    original = theirs(*CASES[case], tmp_path / "in")
    model = models.load(str(tmp_path / "in"))
    params = load_weights(tmp_path / "in", spec_of(model.init))
    rng = np.random.default_rng(0)
    tokens, targets = rng.integers(5, VOCAB, (2, 2, 19)).astype("int32")
    ours = scores_of(model)
    batch = [md.named(each, ["batch", "length"]) for each in (tokens, targets)]

    scores = scored(original, torch.tensor(tokens).long())
    assert far(np.asarray(md.jit(ours)(params, batch[0])), scores.detach().numpy()) <= 1e-5

    flat, wanted = scores.reshape(-1, VOCAB), torch.tensor(targets).long().reshape(-1)
    loss = torch.nn.functional.cross_entropy(flat, wanted)
    loss.backward()

    def mean_loss(params, tokens, targets):
        each = nn.softmax_cross_entropy(ours(params, tokens), targets, over="vocab")
        return md.mean(each)

    value, slopes = md.jit(md.value_and_grad(mean_loss))(params, *batch)
    np.testing.assert_allclose(np.asarray(value), loss.item(), rtol=1e-5)
    grads = gradients(original, tmp_path / "in", tmp_path / "gradients")
    expected = by_path(load_weights(grads, spec_of(model.init)))
    most = max(np.max(np.abs(np.asarray(leaf))) for leaf in expected.values())
    for path, slope in by_path(slopes).items():
        # Some are sums that cancel, as those of the biases of keys: their scale is that of others.
        assert far(np.asarray(slope), np.asarray(expected[path]), 1e-2 * most) <= 1e-5, path


@pytest.mark.parametrize("case", ["bert", "roberta, segments"])
def test_scores_of_two_segments_are_those_of_transformers(case, tmp_path):
    original = theirs(*CASES[case], tmp_path / "in")
    model = models.load(str(tmp_path / "in"))
    params = load_weights(tmp_path / "in", spec_of(model.init))
    tokens = np.arange(5, 43).reshape(2, 19).astype("int32")
    kinds = (tokens % 3 == 0).astype("int32")
    with torch.no_grad():
        of_theirs = {"token_type_ids": torch.tensor(kinds).long()}
        scores = original(torch.tensor(tokens).long(), **of_theirs).logits.numpy()
    given = [md.named(each, ["batch", "length"]) for each in (tokens, kinds)]
    ours = md.jit(lambda p, t, s: bert.logits(model.config, p, t, s))(params, *given)
    assert far(np.asarray(ours), scores) <= 1e-5


def gradients(original, source, folder):
    """Writes the gradients of a model of transformers as weights, to read them by our tables."""
    every = {**dict(original.named_parameters()), **biases_of_routers(original)}
    before = {name: each.detach().clone() for name, each in every.items()}
    with torch.no_grad():
        for each in every.values():
            each.copy_(torch.zeros_like(each) if each.grad is None else each.grad)
    original.save_pretrained(folder)
    with torch.no_grad():
        for name, each in every.items():
            each.copy_(before[name])
    return folder


@pytest.mark.parametrize("case", ["t5", "t5 v1.1"])
def test_an_encoder_decoder_writes_the_text_of_transformers(case, tmp_path):
    kind, settings = CASES[case]
    original = theirs(kind, {**settings, "decoder_start_token_id": 3}, tmp_path / "in")
    model = models.load(str(tmp_path / "in"))
    writer = Writer(model, prompt_tokens=7, new_tokens=6, sampling=Sampling(temperature=0))
    writer.load(load_weights(tmp_path / "in", spec_of(model.init)))
    prompt = [9, 8, 7, 6, 5]
    text = [int(tokens[0]) for tokens in writer.write([prompt])]

    options = {"do_sample": False, "max_new_tokens": 6, "min_new_tokens": 6, "eos_token_id": None}
    wanted = original.generate(torch.tensor([prompt]), **options)[0].tolist()
    assert [3, *text] == wanted


@pytest.mark.parametrize("case", CASES)
def test_weights_go_in_and_out_bit_for_bit_and_transformers_loads_them(case, tmp_path):
    original = theirs(*CASES[case], tmp_path / "in")
    model = models.load(str(tmp_path / "in"))
    params = load_weights(tmp_path / "in", spec_of(model.init))
    write_back(tmp_path / "out", model, params, tmp_path / "in")
    before, after = tensors_of(tmp_path / "in"), tensors_of(tmp_path / "out")
    assert {*after} == {*before}
    for name, array in before.items():
        assert array.dtype == after[name].dtype and array.tobytes() == after[name].tobytes(), name
    again = HEADS.get(CASES[case][0], CAUSAL).from_pretrained(
        tmp_path / "out", attn_implementation="eager"
    )
    tokens = torch.arange(5, 43).reshape(2, 19)
    with torch.no_grad():
        assert torch.equal(scored(again.eval(), tokens), scored(original, tokens))
