"""Latent attention, against the same equations in jax.numpy and float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshdsl as md
from meshdsl.models.configs import TransformerConfig
from meshdsl.models.layers import Drawing, Shared, rotation_of
from meshdsl.models.layers.attention import init_attention
from tests.ops.agreement import assert_close

SIZES = {
    "attention": "latent",
    "kv": 4,
    "kv_rank": 6,
    "rotary_kv": 2,
    "policy": md.Policy.parse("float64"),
}
LENGTH = 5


@functools.cache
def layer(**fields):
    config = TransformerConfig(1, 8, 2, 64, 8, **SIZES, **fields)
    made = md.jit(lambda key: init_attention(config, Drawing(key, 10, "float64"), []))(
        md.random.key(0)
    )
    return config, made


def ours(config, made, x):
    shared = Shared(causal=True, rotation=rotation_of(config, x.shape.get("length")))
    return made(x, shared)


def turned(x):
    """Turns pairs of features by their positions: x is [batch, length, ..., 2 n]."""
    half = x.shape[-1] // 2
    angle = np.arange(x.shape[1])[:, None] * 10000.0 ** (-np.arange(half) / half)
    angle = angle.reshape(1, x.shape[1], *[1] * (x.ndim - 3), half)
    one, two = x[..., :half], x[..., half:]
    cos, sin = np.cos(angle), np.sin(angle)
    return jnp.concatenate([one * cos - two * sin, two * cos + one * sin], -1)


def rms(x, norm):
    return x / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6) * norm.scale


def theirs(p, x):
    source = x if p.query_down is None else rms(x @ p.query_down, p.query_norm)
    latent = rms(x @ p.key_value_down, p.key_value_norm)
    q, k, v = (
        jnp.einsum("ble,ehk->blhk", a, w)
        for a, w in ((source, p.query), (latent, p.key), (latent, p.value))
    )
    q_turned = turned(jnp.einsum("ble,ehk->blhk", source, p.query_rotary))
    k_turned = turned(x @ p.key_rotary)
    scores = jnp.einsum("blhk,bmhk->bhlm", q, k) + jnp.einsum("blhk,bmk->bhlm", q_turned, k_turned)
    scores = scores / np.sqrt(q.shape[-1] + k_turned.shape[-1])
    scores = jnp.where(np.tril(np.ones((x.shape[1],) * 2, bool)), scores, -jnp.inf)
    mixed = jnp.einsum("bhlm,bmhk->blhk", jax.nn.softmax(scores), v)
    return jnp.einsum("blhk,hke->ble", mixed, p.out)


@pytest.mark.long
@pytest.mark.parametrize("query_rank", [None, 3])
def test_latent_attention_and_its_gradients(query_rank):
    config, made = layer(query_rank=query_rank)
    x = np.random.default_rng(0).normal(size=(2, LENGTH, 8))
    named = md.named(x, ["batch", "length", "embed"])

    def total(made, x):
        return md.sum(md.sin(ours(config, made, x)))

    split = {"mesh": "data:2,model:2", "layout": "batch:data; heads:model; length:model?"}
    value, gradients = md.jit(md.value_and_grad(total), backend="numpy", **split)(made, named)
    arrays = jax.tree.map(np.asarray, made)
    plain = jax.tree.map(lambda a: a.data, arrays, is_leaf=lambda a: isinstance(a, md.NamedArray))
    expected, others = jax.value_and_grad(lambda p: jnp.sin(theirs(p, x)).sum())(plain)
    assert_close(value, expected, 1e-6)  # the tables of rotary positions are float32
    for one, other in zip(jax.tree.leaves(gradients), jax.tree.leaves(others), strict=True):
        assert_close(one, other, 1e-6)


def test_keys_and_values_of_all_heads_come_from_few_features():
    config, made = layer(query_rank=3)
    assert made.key.dims.names == made.value.dims.names == ("kv_rank", "heads", "kv")
    assert made.key_rotary.dims.names == ("embed", "rotary_kv")
    kept = config.kv_rank_size + config.rotary_kv_size  # numbers per position that inference keeps
    assert kept < 2 * config.heads * config.kv_size
