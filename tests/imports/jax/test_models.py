"""Models of several kinds: nearly all dims get their names from those of a few arguments."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshdsl as md
from meshdsl.imports.jax.listing import share
from tests.imports.jax.test_function import FSDP, MESH, TENSOR_PARALLEL, is_named

RNG = np.random.default_rng(0)


def draw(*shape):
    return (RNG.normal(size=shape) / 4).astype(np.float32)


def lstm(params, tokens):
    def cell(state, x):
        hidden, memory = state
        gates = x @ params["w_x"] + hidden @ params["w_h"] + params["bias"]
        take, new, keep, give = jnp.split(gates, 4, -1)
        memory = jax.nn.sigmoid(keep) * memory + jax.nn.sigmoid(take) * jnp.tanh(new)
        hidden = jax.nn.sigmoid(give) * jnp.tanh(memory)
        return (hidden, memory), hidden

    x = params["embedding"][tokens]
    start = jnp.zeros((tokens.shape[0], params["w_h"].shape[0]))
    _, hidden = jax.lax.scan(cell, (start, start), jnp.swapaxes(x, 0, 1))
    return jnp.mean(jax.nn.logsumexp(hidden @ params["out"], -1))


def mamba(params, x):
    u, gate = x @ params["w_u"], x @ params["w_gate"]
    numbers = ("NWC", "WIO", "NWC")
    u = jax.lax.conv_general_dilated(
        u, params["conv"], (1,), [(3, 0)], dimension_numbers=numbers, feature_group_count=16
    )
    u = jax.nn.silu(u)
    step = jax.nn.softplus(u * params["step"])
    decay = jnp.exp(-jnp.exp(params["a"]) * step[..., None])
    inputs = jnp.einsum("bli,bls,bli->blis", step, u @ params["b"], u)

    def combine(one, other):
        return one[0] * other[0], other[0] * one[1] + other[1]

    _, state = jax.lax.associative_scan(combine, (decay, inputs), axis=1)
    y = jnp.einsum("blis,bls->bli", state, u @ params["c"]) + u * params["d"]
    return jnp.mean(jnp.square((y * jax.nn.silu(gate)) @ params["out"] + x))


MODELS = {
    "lstm": (
        lstm,
        {
            "embedding": draw(24, 8),
            "w_x": draw(8, 64),
            "w_h": draw(16, 64),
            "bias": draw(64),
            "out": draw(16, 24),
        },
        RNG.integers(0, 24, (4, 6)).astype(np.int32),
        {
            "tokens": "batch length",
            "params/embedding": "vocab embed",
            "params/w_h": "hidden gates",
            "params/out": "_ vocab",
        },
        ("batch:data", "batch:data; vocab:model", "hidden:model", "batch:data+model"),
    ),
    "mamba": (
        mamba,
        {
            "w_u": draw(8, 16),
            "w_gate": draw(8, 16),
            "conv": draw(4, 1, 16),
            "step": draw(16),
            "a": draw(16, 4),
            "b": draw(16, 4),
            "c": draw(16, 4),
            "d": draw(16),
            "out": draw(16, 8),
        },
        draw(4, 8, 8),
        {"x": "batch length embed", "params/a": "inner state", "params/conv": "window ..."},
        ("batch:data", "batch:data; inner:model", "params/embed:data; inner:model", "state:model"),
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_few_names_name_nearly_all_dims(name):
    function, params, x, names, _ = MODELS[name]
    inferred = md.from_jax(function, names).inferred(params, x)
    counted = share(inferred.naming, inferred.frame)
    assert counted.known >= 0.95 * counted.every


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "layout"), [(name, layout) for name in MODELS for layout in MODELS[name][-1]]
)
def test_losses_and_gradients_are_those_of_jax(name, layout):
    function, params, x, names, _ = MODELS[name]
    program = md.from_jax(function, names)
    expected, slopes = jax.value_and_grad(function)(params, x)
    step = md.jit(md.value_and_grad(program), MESH, layout, backend="numpy")
    found, gradients = step(*program.named(params, x))
    np.testing.assert_allclose(float(found), expected, rtol=1e-5)
    check_gradients(gradients, slopes)


def check_gradients(gradients, slopes):
    """Checks gradients of ours by those of JAX, to 1e-5."""
    ours = jax.tree.leaves(gradients, is_leaf=is_named)
    for mine, theirs in zip(ours, jax.tree.leaves(slopes), strict=True):
        np.testing.assert_allclose(np.asarray(mine), theirs, atol=1e-5)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("layout", ["batch:data", TENSOR_PARALLEL, FSDP])
def test_a_transformer_of_flax(layout):
    nn = pytest.importorskip("flax.linen")

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x, mask):
            x = x + nn.MultiHeadDotProductAttention(4, name="attention")(
                nn.LayerNorm()(x), mask=mask
            )
            h = nn.gelu(nn.Dense(64, name="w_in")(nn.LayerNorm()(x)))
            return x + nn.Dense(32, name="w_out")(h)

    class Transformer(nn.Module):
        @nn.compact
        def __call__(self, tokens):
            embed = nn.Embed(48, 32)
            x = embed(tokens) + self.param("positions", nn.initializers.normal(), (16, 32))
            for _ in range(2):
                x = Block()(x, nn.make_causal_mask(tokens))
            return embed.attend(nn.LayerNorm()(x))

    def loss(params, tokens):
        return jnp.mean(jax.nn.logsumexp(model.apply(params, tokens), -1))

    model, tokens = Transformer(), RNG.integers(0, 48, (8, 16)).astype(np.int32)
    params = jax.tree.map(np.asarray, model.init(jax.random.key(0), tokens))
    names = {
        "tokens": "batch length",
        "params/**/embedding": "vocab embed",
        "params/**/query/kernel": "_ heads kv",
        "params/**/value/kernel": "_ _ kv",
        "params/**/w_in/kernel": "_ d_ff",
    }
    program = md.from_jax(loss, names)
    inferred = program.inferred(params, tokens)
    counted = share(inferred.naming, inferred.frame)
    assert counted.known == counted.every > 500
    expected, slopes = jax.value_and_grad(loss)(params, tokens)
    found, gradients = md.jit(md.value_and_grad(program), MESH, layout)(
        *program.named(params, tokens)
    )
    np.testing.assert_allclose(float(found), expected, rtol=1e-5)
    check_gradients(gradients, slopes)
