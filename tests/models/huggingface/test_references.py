"""Models of folders against the formulas of their papers, written in numpy with float64."""

import math

import numpy as np
import pytest

import meshdsl as md
from meshdsl import models
from meshdsl.training.checkpointing.weights import load_weights
from meshdsl.training.state import spec_of
from tests.models.huggingface.folders import CONFIGS, SOURCE, scores_of, tensors_of, write_folder

TOKENS = np.random.default_rng(0).integers(0, 67, (2, 20)).astype("int32")


ORIGINAL = "original_max_position_embeddings"


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def causal(q, k, v, window=None, scale=None, cap=None):
    """Attention of heads [batch, heads, length, features] to earlier positions, in a window."""
    scores = q @ k.swapaxes(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if cap is not None:
        scores = cap * np.tanh(scores / cap)
    hidden = np.triu(np.ones(scores.shape[-2:], bool), 1)
    if window is not None:
        hidden |= np.tril(np.ones(scores.shape[-2:], bool), -window)
    return softmax(np.where(hidden, -np.inf, scores)) @ v


def heads(x, count):
    return x.reshape(*x.shape[:2], count, -1).swapaxes(1, 2)


def merged(x):
    return x.swapaxes(1, 2).reshape(x.shape[0], x.shape[2], -1)


def gelu(h):
    """Hendrycks and Gimpel 2016, section 2."""
    return 0.5 * h * (1 + np.tanh(np.sqrt(2 / np.pi) * (h + 0.044715 * h**3)))


def normal(h):
    """The distribution function of the normal distribution."""
    return 0.5 * (1 + np.vectorize(math.erf)(h * np.sqrt(0.5)))


def gpt2(config, w):
    """Radford et al. 2019, section 2.3."""

    def norm(x, name):
        mean, var = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
        return (x - mean) / np.sqrt(var + 1e-5) * w[f"{name}.weight"] + w[f"{name}.bias"]

    def linear(x, name):
        return x @ w[f"{name}.weight"] + w[f"{name}.bias"]

    x = w["transformer.wte.weight"][TOKENS] + w["transformer.wpe.weight"][: TOKENS.shape[1]]
    for number in range(config["n_layer"]):
        layer = f"transformer.h.{number}"
        q, k, v = np.split(linear(norm(x, f"{layer}.ln_1"), f"{layer}.attn.c_attn"), 3, axis=-1)
        mixed = causal(*(heads(each, config["n_head"]) for each in (q, k, v)))
        x = x + linear(merged(mixed), f"{layer}.attn.c_proj")
        h = linear(norm(x, f"{layer}.ln_2"), f"{layer}.mlp.c_fc")
        x = x + linear(gelu(h), f"{layer}.mlp.c_proj")
    return norm(x, "transformer.ln_f") @ w["transformer.wte.weight"].T


def turned(x, base, scaling, slower=1.0):
    """Rotary positions: features i and i + n/2 are a point that turns (RoFormer, section 3.4.2).

    With Llama 3.1's scaling: slow features turn at a rate divided by the factor, fast ones as they
    do, and those between at a blend of both rates. The others: `rescaled`.
    """
    half = x.shape[-1] // 2
    rate, size = base ** (-np.arange(half) / half), 1.0
    kind = (scaling or {}).get("rope_type")
    if kind not in (None, "llama3"):
        rate, size = rescaled(rate, base, scaling, x.shape[-2])
    elif scaling is not None:
        length, waves = scaling["original_max_position_embeddings"], 2 * np.pi / rate
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        blend = (length / waves - low) / (high - low)
        between = (1 - blend) * rate / scaling["factor"] + blend * rate
        rate = np.where(
            waves > length / low,
            rate / scaling["factor"],
            np.where(waves < length / high, rate, between),
        )
    angle = np.arange(x.shape[-2])[:, None] * rate / slower
    one, two = x[..., :half], x[..., half:]
    cos, sin = size * np.cos(angle), size * np.sin(angle)
    return np.concatenate([one * cos - two * sin, two * cos + one * sin], -1)


def rescaled(rate, base, scaling, length):
    """Returns rates of rotation, and what cosine and sine are multiplied by."""
    half, kind, original = len(rate), scaling["rope_type"], scaling.get(ORIGINAL)
    if kind == "longrope":  # Ding et al. 2024, section 3; the factor is 64 / 16
        divisors = scaling["long_factor" if length > original else "short_factor"]
        return rate / np.array(divisors), np.sqrt(1 + np.log(4) / np.log(original))
    factor = scaling["factor"]
    if kind == "dynamic":  # Peng et al. 2023, "YaRN", appendix B.1, with their base of section 3.1
        stretched = factor * length / 12 - (factor - 1)
        base = base * stretched ** (half / (half - 1))
        return base ** (-np.arange(half) / half), 1.0
    # Section 3.2: pair d turns r(d) times in the first training; the ramp is even in d, from the
    # whole pair below r = beta_fast to that above r = beta_slow, as in their code.
    pairs = [
        half * np.log(original / (2 * np.pi * scaling[beta])) / np.log(base)
        for beta in ("beta_fast", "beta_slow")
    ]
    first, last = max(np.floor(pairs[0]), 0), np.ceil(pairs[1])
    slow = np.clip((np.arange(half) - first) / (last - first), 0, 1)
    return rate * (slow / factor + 1 - slow), 0.1 * np.log(factor) + 1


def llama(config, w):
    """Touvron et al. 2023, section 2.2: RMS norm, SwiGLU, rotary positions; grouped queries.

    Mistral (Jiang et al. 2023, section 2) has windows, the last layers of Qwen 2 too; Qwen 2 has
    biases, and Qwen 3 normalises the queries and keys of each head.
    """
    eps, base = config.get("rms_norm_eps", 1e-6), config.get("rope_theta", 10000.0)
    count, of_keys = config["num_attention_heads"], config["num_key_value_heads"]

    def norm(x, name):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * w[f"{name}.weight"]

    def linear(x, name):
        return x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0.0)

    x = w["model.embed_tokens.weight"][TOKENS]
    for number in range(config["num_hidden_layers"]):
        layer = f"model.layers.{number}"
        h, own = norm(x, f"{layer}.input_layernorm"), f"{layer}.self_attn"
        q, k, v = (
            heads(linear(h, f"{own}.{name}_proj"), n)
            for name, n in (("q", count), ("k", of_keys), ("v", of_keys))
        )
        if f"{own}.q_norm.weight" in w:
            q, k = norm(q, f"{own}.q_norm"), norm(k, f"{own}.k_norm")
        q, k = (turned(each, base, config.get("rope_scaling")) for each in (q, k))
        k, v = (np.repeat(each, count // of_keys, axis=1) for each in (k, v))
        has_window = number >= config.get("max_window_layers", 0)
        window = config.get("sliding_window") if has_window else None
        x = x + linear(merged(causal(q, k, v, window)), f"{own}.o_proj")
        h = norm(x, f"{layer}.post_attention_layernorm")
        gate = linear(h, f"{layer}.mlp.gate_proj")
        h = gate / (1 + np.exp(-gate)) * linear(h, f"{layer}.mlp.up_proj")
        x = x + linear(h, f"{layer}.mlp.down_proj")
    table = w[
        "model.embed_tokens.weight" if config.get("tie_word_embeddings") else "lm_head.weight"
    ]
    return norm(x, "model.norm") @ table.T


def gemma(config, w):
    """Gemma Team 2024, "Gemma 2", section 2; 2025, "Gemma 3", section 2; their reference code."""
    third = config["model_type"] == "gemma3_text"
    count, of_keys = config["num_attention_heads"], config["num_key_value_heads"]

    def norm(x, name):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * (1 + w[f"{name}.weight"])

    def linear(x, name):
        return x @ w[f"{name}.weight"].T

    x = w["model.embed_tokens.weight"][TOKENS] * np.sqrt(config["hidden_size"])
    for number in range(config["num_hidden_layers"]):
        layer = f"model.layers.{number}"
        h, own = norm(x, f"{layer}.input_layernorm"), f"{layer}.self_attn"
        q, k, v = (
            heads(linear(h, f"{own}.{name}_proj"), n)
            for name, n in (("q", count), ("k", of_keys), ("v", of_keys))
        )
        base, slower = 10000.0, 1.0
        has_window = number % 2 == 0
        if third:
            q, k = norm(q, f"{own}.q_norm"), norm(k, f"{own}.k_norm")
            has_window = (number + 1) % config["sliding_window_pattern"] > 0
            base = config["rope_local_base_freq" if has_window else "rope_theta"]
            slower = 1.0 if has_window else config["rope_scaling"]["factor"]
        q, k = (turned(each, base, None, slower) for each in (q, k))
        k, v = (np.repeat(each, count // of_keys, axis=1) for each in (k, v))
        window = config["sliding_window"] if has_window else None
        scale, cap = config["query_pre_attn_scalar"] ** -0.5, config.get("attn_logit_softcapping")
        y = linear(merged(causal(q, k, v, window, scale, cap)), f"{own}.o_proj")
        x = x + norm(y, f"{layer}.post_attention_layernorm")
        h = norm(x, f"{layer}.pre_feedforward_layernorm")
        y = gelu(linear(h, f"{layer}.mlp.gate_proj")) * linear(h, f"{layer}.mlp.up_proj")
        y = linear(y, f"{layer}.mlp.down_proj")
        x = x + norm(y, f"{layer}.post_feedforward_layernorm")
    scores = norm(x, "model.norm") @ w["model.embed_tokens.weight"].T
    cap = config.get("final_logit_softcapping")
    return scores if cap is None else cap * np.tanh(scores / cap)


def bucket(distance, causal, count, most):
    """Returns the bucket of memory_position - position (Raffel et al. 2020, section 2.1), exactly.

    Bucket single + i begins at single * (most / single) ** (i / rest), here without roots.
    """
    if not causal:
        count //= 2
        return (count if distance > 0 else 0) + bucket(-abs(distance), True, count, most)
    behind, single = max(-distance, 0), count // 2
    if behind < single:
        return behind
    rest = count - single
    begun = [behind**rest * single**i >= most**i * single**rest for i in range(1, rest)]
    return single + sum(begun)


def t5(config, w):
    """Raffel et al. 2020, section 2.1; version 1.1: its reference code."""
    gated, count = config.get("feed_forward_proj") == "gated-gelu", config["num_heads"]
    far = config["relative_attention_num_buckets"], config["relative_attention_max_distance"]

    def norm(x, name):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * w[f"{name}.weight"]

    def attended(x, memory, name, bias, hidden=0.0):
        q, k, v = (
            heads(each @ w[f"{name}.{n}.weight"].T, count)
            for n, each in zip("qkv", (x, memory, memory), strict=True)
        )
        return merged(softmax(q @ k.swapaxes(-1, -2) + bias + hidden) @ v) @ w[f"{name}.o.weight"].T

    def stack(name, tokens, memory=None):
        x, causal = w["shared.weight"][tokens], memory is not None
        places = np.arange(tokens.shape[1])
        table = w[f"{name}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"]
        distances = places - places[:, None]
        bias = table[np.vectorize(lambda d: bucket(int(d), causal, *far))(distances)]
        hidden = np.where(causal & (distances > 0), -np.inf, 0.0)
        for number in range(config["num_layers"]):
            layer = f"{name}.block.{number}.layer"
            h = norm(x, f"{layer}.0.layer_norm")
            x = x + attended(h, h, f"{layer}.0.SelfAttention", bias.transpose(2, 0, 1), hidden)
            if memory is not None:
                h = norm(x, f"{layer}.1.layer_norm")
                x = x + attended(h, memory, f"{layer}.1.EncDecAttention", 0.0)
            last = f"{layer}.{2 if causal else 1}"
            h, mlp = norm(x, f"{last}.layer_norm"), f"{last}.DenseReluDense"
            if gated:
                h = gelu(h @ w[f"{mlp}.wi_0.weight"].T) * (h @ w[f"{mlp}.wi_1.weight"].T)
            else:
                h = np.maximum(h @ w[f"{mlp}.wi.weight"].T, 0)
            x = x + h @ w[f"{mlp}.wo.weight"].T
        return norm(x, f"{name}.final_layer_norm")

    x = stack("decoder", TOKENS, stack("encoder", TOKENS[:, SOURCE]))
    if config.get("tie_word_embeddings", True):
        return x * config["d_model"] ** -0.5 @ w["shared.weight"].T
    return x @ w["lm_head.weight"].T


def encoder(config, w):
    """Devlin et al. 2019 and, for RoBERTa's positions, Liu et al. 2019 and its reference code."""
    kind = config["model_type"]
    head = {
        "bert": ("cls.predictions.transform.dense", "cls.predictions.transform.LayerNorm"),
        "roberta": ("lm_head.dense", "lm_head.layer_norm"),
    }[kind]

    def norm(x, name):
        mean, var = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
        return (x - mean) / np.sqrt(var + 1e-12) * w[f"{name}.weight"] + w[f"{name}.bias"]

    def linear(x, name):
        return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]

    def activated(x):
        return np.maximum(x, 0) if config.get("hidden_act") == "relu" else x * normal(x)

    first = config["pad_token_id"] + 1 if kind == "roberta" else 0
    table = w[f"{kind}.embeddings.word_embeddings.weight"]
    x = table[TOKENS] + w[f"{kind}.embeddings.token_type_embeddings.weight"][0]
    x = x + w[f"{kind}.embeddings.position_embeddings.weight"][first : first + TOKENS.shape[1]]
    x = norm(x, f"{kind}.embeddings.LayerNorm")
    for number in range(config["num_hidden_layers"]):
        layer = f"{kind}.encoder.layer.{number}"
        names = (f"{layer}.attention.self.{name}" for name in ("query", "key", "value"))
        q, k, v = (heads(linear(x, name), config["num_attention_heads"]) for name in names)
        mixed = merged(softmax(q @ k.swapaxes(-1, -2) * q.shape[-1] ** -0.5) @ v)
        attended = f"{layer}.attention.output"
        x = norm(x + linear(mixed, f"{attended}.dense"), f"{attended}.LayerNorm")
        h = activated(linear(x, f"{layer}.intermediate.dense"))
        x = norm(x + linear(h, f"{layer}.output.dense"), f"{layer}.output.LayerNorm")
    h = norm(activated(linear(x, head[0])), head[1])
    return h @ table.T + w["cls.predictions.bias" if kind == "bert" else "lm_head.bias"]


def deepseek(config, w):
    """DeepSeek-AI 2024, "DeepSeek-V2", section 2, "DeepSeek-V3", section 2.1; their code."""
    third, count = config["model_type"] == "deepseek_v3", config["num_attention_heads"]
    plain, turning = config["qk_nope_head_dim"], config["qk_rope_head_dim"]
    scaling = config.get("rope_scaling")
    size, sharper = 1.0, 1.0
    if scaling:  # cosine and sine keep their size: mscale and mscale_all_dim are the same here
        sharper = 0.1 * scaling["mscale_all_dim"] * np.log(scaling["factor"]) + 1
        size = 0.1 * np.log(scaling["factor"]) + 1

    def norm(x, name):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * w[f"{name}.weight"]

    def linear(x, name):
        return x @ w[f"{name}.weight"].T

    def rotated(x):  # pairs stand side by side
        x = np.concatenate([x[..., ::2], x[..., 1::2]], -1)
        return turned(x, 10000.0, scaling) / size

    def mlp(x, name):
        gate = linear(x, f"{name}.gate_proj")
        return linear(
            gate / (1 + np.exp(-gate)) * linear(x, f"{name}.up_proj"), f"{name}.down_proj"
        )

    def experts(x, name):
        logits, groups = linear(x, f"{name}.gate"), config["n_group"]
        chance = 1 / (1 + np.exp(-logits)) if third else softmax(logits)
        ranked = chance + w[f"{name}.gate.e_score_correction_bias"] if third else chance
        if third or config.get("topk_method") == "group_limited_greedy":
            best = np.sort(ranked.reshape(*ranked.shape[:2], groups, -1), -1)
            best = best[..., -2:].sum(-1) if third else best[..., -1]
            least = np.sort(best, -1)[..., -config["topk_group"], None]
            apart = np.repeat(best >= least, ranked.shape[-1] // groups, axis=-1)
            ranked = np.where(apart, ranked, -np.inf)
        least = np.sort(ranked, -1)[..., -config["num_experts_per_tok"], None]
        weight = np.where(ranked >= least, chance, 0)
        weight = weight / weight.sum(-1, keepdims=True) if third else weight
        mixed = sum(
            weight[..., [e]] * mlp(x, f"{name}.experts.{e}") for e in range(weight.shape[-1])
        )
        return config.get("routed_scaling_factor", 1) * mixed + mlp(x, f"{name}.shared_experts")

    x = w["model.embed_tokens.weight"][TOKENS]
    for number in range(config["num_hidden_layers"]):
        layer = f"model.layers.{number}"
        own, h = f"{layer}.self_attn", norm(x, f"{layer}.input_layernorm")
        if config["q_lora_rank"] is None:
            q = heads(linear(h, f"{own}.q_proj"), count)
        else:
            low = norm(linear(h, f"{own}.q_a_proj"), f"{own}.q_a_layernorm")
            q = heads(linear(low, f"{own}.q_b_proj"), count)
        low, k_turned = np.split(linear(h, f"{own}.kv_a_proj_with_mqa"), [-turning], -1)
        both = heads(linear(norm(low, f"{own}.kv_a_layernorm"), f"{own}.kv_b_proj"), count)
        k_turned = np.repeat(rotated(k_turned[:, None]), count, axis=1)
        q = np.concatenate([q[..., :plain], rotated(q[..., plain:])], -1)
        k = np.concatenate([both[..., :plain], k_turned], -1)
        mixed = causal(q, k, both[..., plain:], None, sharper**2 * (plain + turning) ** -0.5)
        x = x + linear(merged(mixed), f"{own}.o_proj")
        h = norm(x, f"{layer}.post_attention_layernorm")
        dense = number < config["first_k_dense_replace"]
        x = x + (mlp if dense else experts)(h, f"{layer}.mlp")
    return norm(x, "model.norm") @ w["lm_head.weight"].T


REFERENCES = {
    "deepseek_v2": deepseek,
    "deepseek_v2, groups": deepseek,
    "deepseek_v3": deepseek,
    "t5": t5,
    "t5 v1.1": t5,
    "gpt2": gpt2,
    "gemma2": gemma,
    "gemma3": gemma,
    "bert": encoder,
    "bert, pooler": encoder,
    "roberta": encoder,
}
LLAMAS = (
    "llama 2",
    "llama 3.1",
    "llama, yarn",
    "llama, dynamic",
    "llama, longrope",
    "mistral",
    "qwen2",
    "qwen3",
)


@pytest.mark.parametrize(
    ("case", "reference"), [*REFERENCES.items(), *((case, llama) for case in LLAMAS)]
)
def test_scores_are_those_of_the_papers(case, reference, tmp_path):
    folder = write_folder(tmp_path / "in", CONFIGS[case])
    model = models.load(str(folder), "policy=float64")
    params = load_weights(folder, spec_of(model.init))
    weights = {name: array.astype("float64") for name, array in tensors_of(folder).items()}
    expected = reference(CONFIGS[case], weights)
    scores = md.jit(scores_of(model), backend="numpy")(
        params, md.named(TOKENS, ["batch", "length"])
    )
    # Tables of rotations are float32.
    np.testing.assert_allclose(np.asarray(scores), expected, atol=1e-5 * np.abs(expected).max())
