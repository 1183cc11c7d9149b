"""A model of Haiku, where that is installed: its names, and the losses and gradients of JAX."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshdsl as md
from meshdsl.imports.jax.listing import share
from tests.imports.jax.distances import distances

hk = pytest.importorskip("haiku")
BATCH, LENGTH, VOCAB, EMBED, HEADS = 4, 6, 12, 16, 4
NAMES = {
    "tokens": "batch length",
    "params/embed/embeddings": "vocab embed",
    "params/attention/query/w": "_ (heads kv)",
    "params/attention/value/w": "_ (heads kv)",
    "params/w_in/w": "_ d_ff",
    "params/lstm/linear/w": "_ gates",
}


def forward(tokens):
    """A block of a transformer, and an LSTM over what it returns."""
    embed = hk.Embed(VOCAB, EMBED, name="embed")
    x = embed(tokens)
    w_init = hk.initializers.VarianceScaling(1.0)
    attend = hk.MultiHeadAttention(HEADS, EMBED // HEADS, w_init=w_init, name="attention")
    h = hk.LayerNorm(-1, True, True)(x)
    x = x + attend(h, h, h, jnp.tril(jnp.ones((1, 1, LENGTH, LENGTH))))
    h = hk.Linear(EMBED, name="w_out")(jax.nn.gelu(hk.Linear(24, name="w_in")(x)))
    x = x + hk.dropout(hk.next_rng_key(), 0.1, h)
    core = hk.LSTM(EMBED, name="lstm")
    x, _ = hk.dynamic_unroll(core, x, core.initial_state(BATCH), time_major=False)
    return x @ embed.embeddings.T


def loss(params, key, tokens):
    logits = hk.transform(forward).apply(params, key, tokens)
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, ::-1, None], -1)
    return -jnp.mean(chosen)


@pytest.mark.long
def test_a_transformer_with_an_lstm():
    tokens = np.random.default_rng(0).integers(0, VOCAB, (BATCH, LENGTH)).astype("int32")
    key = jax.random.PRNGKey(1)
    params = jax.tree.map(np.asarray, hk.transform(forward).init(key, tokens))
    expected, slopes = jax.value_and_grad(loss)(params, key, tokens)
    program = md.from_jax(loss, NAMES)
    inferred = program.inferred(params, key, tokens)
    counted = share(inferred.naming, inferred.frame)
    assert counted.known >= 0.95 * counted.every
    step = md.value_and_grad(program)
    layout = "batch:data; heads:model; d_ff:model; vocab:model"
    run = md.jit(step, "data:2,model:2", layout, backend="numpy")
    value, gradients = run(*program.named(params, key, tokens))
    ours = jax.tree.leaves(md.unnamed([value, gradients]))
    assert max(distances(ours, jax.tree.leaves([expected, slopes]))) <= 1e-5
