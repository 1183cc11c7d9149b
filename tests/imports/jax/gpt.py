"""One small GPT twice: in plain JAX, and in the language."""

import jax
import jax.numpy as jnp
import numpy as np

import meshdsl as md
from meshdsl import nn

EMBED, HEADS, KV, D_FF, VOCAB, LENGTH, BATCH = 32, 4, 8, 64, 48, 16, 8
NAMES = {
    "tokens": "batch length",
    "targets": "batch length",
    "params/embedding": "vocab embed",
    "params/**/query": "embed heads kv",
    "params/**/value": "_ _ kv",
    "params/**/w_in": "_ d_ff",
}


def weights(layers=2):
    rng = np.random.default_rng(0)

    def draw(*shape):
        return (rng.normal(size=shape) / np.sqrt(shape[0])).astype(np.float32)

    def block():
        return {
            "query": draw(EMBED, HEADS, KV),
            "key": draw(EMBED, HEADS, KV),
            "value": draw(EMBED, HEADS, KV),
            "out": draw(HEADS, KV, EMBED),
            "w_in": draw(EMBED, D_FF),
            "w_out": draw(D_FF, EMBED),
            "norm_1": np.ones(EMBED, np.float32),
            "norm_2": np.ones(EMBED, np.float32),
        }

    return {
        "embedding": draw(VOCAB, EMBED),
        "positions": draw(LENGTH, EMBED),
        "norm": np.ones(EMBED, np.float32),
        "blocks": [block() for _ in range(layers)],
    }


def batch():
    rng = np.random.default_rng(1)
    tokens = rng.integers(0, VOCAB, (BATCH, LENGTH)).astype(np.int32)
    return tokens, np.roll(tokens, -1, 1)


# In plain JAX.


def rms_norm(x, scale):
    return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + 1e-6) * scale


def jax_block(x, p):
    h = rms_norm(x, p["norm_1"])
    q = jnp.einsum("ble,ehk->blhk", h, p["query"])
    k = jnp.einsum("ble,ehk->blhk", h, p["key"])
    v = jnp.einsum("ble,ehk->blhk", h, p["value"])
    scores = jnp.einsum("bqhk,bmhk->bhqm", q, k) * KV**-0.5
    causal = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    weights = jax.nn.softmax(jnp.where(causal, scores, -1e30))
    mixed = jnp.einsum("bhqm,bmhk->bqhk", weights, v)
    x = x + jnp.einsum("blhk,hke->ble", mixed, p["out"])
    h = rms_norm(x, p["norm_2"])
    return x + jax.nn.gelu(h @ p["w_in"]) @ p["w_out"]


def jax_loss(params, tokens, targets):
    x = params["embedding"][tokens] + params["positions"]
    for p in params["blocks"]:
        x = jax_block(x, p)
    logits = rms_norm(x, params["norm"]) @ params["embedding"].T
    picked = jnp.take_along_axis(logits, targets[..., None], -1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(logits, -1) - picked)


# In the language.


def named_norm(x, scale):
    return x * md.rsqrt(md.mean(md.square(x), "embed") + 1e-6) * scale


def named_block(x, p):
    h = named_norm(x, p["norm_1"])
    q = md.einsum(h, p["query"], over="embed")
    k = md.einsum(h, p["key"], over="embed").rename(length="memory_length")
    v = md.einsum(h, p["value"], over="embed").rename(length="memory_length")
    scores = md.einsum(q, k, over="kv") * KV**-0.5
    length, memory = scores.dims.get("length"), scores.dims.get("memory_length")
    causal = md.outer(md.greater_equal, md.arange(length), md.arange(memory))
    mixed = md.einsum(md.softmax(md.where(causal, scores, -1e30), memory), v, over=memory)
    x = x + md.einsum(mixed, p["out"], over=["heads", "kv"])
    h = named_norm(x, p["norm_2"])
    return x + md.einsum(md.gelu(md.einsum(h, p["w_in"], over="embed")), p["w_out"], over="d_ff")


def named_loss(params, tokens, targets):
    x = md.take(params["embedding"], tokens, "vocab") + params["positions"]
    for p in params["blocks"]:
        x = named_block(x, p)
    logits = md.einsum(named_norm(x, params["norm"]), params["embedding"], over="embed")
    return md.mean(nn.softmax_cross_entropy(logits, targets, over="vocab"))
