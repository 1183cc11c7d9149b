"""Attention, against jax.numpy in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshdsl as md
from meshdsl import nn

RNG = np.random.default_rng(0)
Q = RNG.normal(size=(4, 8, 4, 2, 16))  # batch, length, heads, group, kv
K, V = RNG.normal(size=(2, 4, 8, 4, 16))  # batch, memory_length, heads, kv
QUERY = ["batch", "length", "heads", "group", "kv"]
PLAIN = ["batch", "length", "heads", "kv"]
MEMORY = ["batch", "memory_length", "heads", "kv"]


def reference(q, k, v, causal):
    """Every query head has its own copy of the keys and values."""
    scores = jnp.einsum("blhgk,bmhk->bhglm", q, k) / np.sqrt(q.shape[-1])
    if causal:
        scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -jnp.inf)
    return jnp.einsum("bhglm,bmhk->blhgk", jax.nn.softmax(scores, -1), v)


def attend(q, k, v, query=QUERY, where=None, **kwargs):
    function = md.jit(lambda q, k, v: md.attention(q, k, v, **kwargs), **(where or {}))
    return function(md.named(q, query), md.named(k, MEMORY), md.named(v, MEMORY))


@pytest.mark.parametrize("causal", [False, True])
def test_grouped_queries_share_keys_and_values(causal):
    found = attend(Q, K, V, causal=causal)
    assert found.dims.names == tuple(QUERY)
    np.testing.assert_allclose(found, reference(Q, K, V, causal), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("causal", [False, True])
def test_multi_head_attention_has_no_group(causal):
    found = attend(Q[:, :, :, 0], K, V, PLAIN, causal=causal)
    expected = reference(Q[:, :, :, :1], K, V, causal)[:, :, :, 0]
    np.testing.assert_allclose(found, expected, rtol=1e-10, atol=1e-12)


def test_lengths_and_value_features_may_differ():
    q, v = md.named(Q[:, :3], QUERY), md.named(V[..., :5], [*MEMORY[:3], "value"])
    found = md.jit(lambda q, k, v: md.attention(q, k, v))(q, md.named(K, MEMORY), v)
    assert found.dims.names == ("batch", "length", "heads", "group", "value")
    np.testing.assert_allclose(found, reference(Q[:, :3], K, V[..., :5], False), rtol=1e-10)


@pytest.mark.parametrize(
    "layout",
    [
        "batch:data; heads:model",
        "batch:data; heads:model; length:model?",
        "length:data; memory_length:model",
        "kv:model",
    ],
)
@pytest.mark.parametrize("backend", ["jax", "numpy"])
def test_values_and_gradients_are_the_same_on_every_layout(layout, backend):
    def loss(q, k, v):
        return md.sum(md.square(nn.attention(q, k, v, causal=True)))

    named = [md.named(a, d) for a, d in ((Q, QUERY), (K, MEMORY), (V, MEMORY))]
    where = {"mesh": "data:2,model:4", "layout": layout, "backend": backend}
    value, gradients = md.jit(
        lambda q, k, v: md.value_and_grad(loss, wrt=(0, 1, 2))(q, k, v), **where
    )(*named)
    expected = jax.value_and_grad(lambda *x: jnp.sum(reference(*x, True) ** 2), argnums=(0, 1, 2))(
        Q, K, V
    )
    np.testing.assert_allclose(value, expected[0], rtol=1e-10)
    for found, wanted in zip(gradients, expected[1], strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-9, atol=1e-11)


def test_half_precision_has_weights_in_float32():
    def half(q, k, v):
        return nn.attention(*(md.cast(x, "bfloat16") for x in (q, k, v)), causal=True)

    graph = md.jit(half).trace(*(md.named(a, d) for a, d in ((Q, QUERY), (K, MEMORY), (V, MEMORY))))
    assert graph.outputs[0].dtype.name == "bfloat16"
    assert {op.outputs[0].dtype.name for op in graph.operations if op.name == "exp"} == {"float32"}


def test_large_scores_do_not_overflow():
    found = np.asarray(attend(1e4 * Q, K, V, causal=True))
    assert np.isfinite(found).all()


def test_missing_and_surplus_dims_are_errors():
    with pytest.raises(ValueError, match=r"attention: no dim `memory` in .* `memory_length`"):
        attend(Q, K, V, over="memory")
    with pytest.raises(
        ValueError, match=r"the keys have dims \[heads=4\] that the queries .* lack"
    ):
        attend(Q[:, :, 0, 0], K, V, ["batch", "length", "kv"])
