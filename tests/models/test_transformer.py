"""The transformer, against jax.numpy in float64, on every layout, in every variant."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshdsl as md
from meshdsl import models
from meshdsl.models.remat import NAMES
from meshdsl.tensors.module import path_of

BASE = "layers=2,embed=16,d_ff=32,vocab=64,policy=float64"
TINY = f"{BASE},heads=4,max_length=8"
VARIANTS = {
    "rms, rotary, gelu": TINY,
    "layer norm, learned, biases": f"{TINY},norm=layer,positions=learned,bias=true",
    "fewer positions than learned": f"{BASE},heads=4,positions=learned,max_length=12",
    "grouped queries, gated, untied": f"{BASE},heads=8,kv_heads=4,kv=6,mlp=swiglu,"
    "tied=false,bias=true",
    "layer norm without bias": f"{TINY},norm=layer,rotary_base=100",
}
TENSOR = "batch:data; heads:model; d_ff:model; vocab:model"


def gradient_step(model):
    return lambda params, batch: md.value_and_grad(model.loss)(params, batch)


@functools.cache
def problem(overrides):
    """Returns model, parameters that are nowhere 0 or 1, and a batch."""
    model = models.load("gpt_mini", overrides)
    rng = np.random.default_rng(0)
    batch = {
        name: md.named(rng.integers(0, 64, (4, 8)).astype("int32"), spec.dims)
        for name, spec in model.batch_spec(4, 8).items()
    }
    params = jax.tree.map(
        lambda a: np.asarray(a) + 0.1 * rng.normal(size=a.shape),
        md.jit(model.init)(md.random.key(0)),
    )
    return model, params, batch


def by_path(tree):
    keyed = jax.tree_util.tree_flatten_with_path(
        tree, is_leaf=lambda x: isinstance(x, md.NamedArray)
    )
    return {path_of(keys): np.asarray(leaf) for keys, leaf in keyed[0]}


@functools.cache
def expected(overrides):
    """Returns loss and gradients by path, of a transformer written in jax.numpy."""
    model, params, batch = problem(overrides)
    tokens, targets = (np.asarray(batch[name]) for name in ("tokens", "targets"))
    loss = functools.partial(reference_loss, model.config, tokens, targets)
    return jax.jit(jax.value_and_grad(loss))(by_path(params))


def reference_loss(config, tokens, targets, p):
    x = p["embedding"][tokens]
    if "positions" in p:
        x = x + p["positions"][: tokens.shape[1]]
    for layer in range(config.layers):
        w = {k.removeprefix("blocks/"): v[layer] for k, v in p.items() if k.startswith("blocks/")}
        h = reference_norm(config, x, w, "attention_norm")
        q, k, v = (
            jnp.tensordot(h, w[f"attention/{n}"], 1) + w.get(f"attention/{n}_bias", 0.0)
            for n in ("query", "key", "value")
        )
        if config.positions == "rotary":
            q, k = (reference_rotary(a, config.rotary_base) for a in (q, k))
        q = q.reshape(*k.shape[:3], -1, k.shape[-1])  # a group of one where there is no group
        scores = jnp.einsum("blhgk,bmhk->bhglm", q, k) / np.sqrt(k.shape[-1])
        visible = np.tril(np.ones(scores.shape[-2:], bool))
        weights = jax.nn.softmax(jnp.where(visible, scores, -jnp.inf), -1)
        mixed = jnp.einsum("bhglm,bmhk->blhgk", weights, v)
        out = w["attention/out"].reshape(-1, config.embed)
        x = x + mixed.reshape(*x.shape[:2], -1) @ out + w.get("attention/out_bias", 0.0)
        h = reference_norm(config, x, w, "mlp_norm")
        inner = h @ w["mlp/w_in"] + w.get("mlp/bias_in", 0.0)
        if config.mlp == "swiglu":
            inner = jax.nn.silu(h @ w["mlp/w_gate"]) * inner
        else:
            inner = jax.nn.gelu(inner)
        x = x + inner @ w["mlp/w_out"] + w.get("mlp/bias_out", 0.0)
    x = reference_norm(config, x, p, "final_norm")
    scores = x @ (p["unembedding"] if "unembedding" in p else p["embedding"].T)
    chosen = jnp.take_along_axis(jax.nn.log_softmax(scores, -1), targets[..., None], -1)
    return -jnp.mean(chosen)


def reference_norm(config, x, p, name):
    if config.norm == "rms":
        return x / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6) * p[f"{name}/scale"]
    x = (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-5)
    return x * p[f"{name}/scale"] + p.get(f"{name}/bias", 0.0)


def reference_rotary(x, base):
    half = x.shape[-1] // 2
    angle = np.arange(x.shape[1])[:, None] * base ** (-np.arange(half) / half)
    angle = angle.reshape(1, x.shape[1], *[1] * (x.ndim - 3), half)
    one, two = x[..., :half], x[..., half:]
    cos, sin = np.cos(angle), np.sin(angle)
    return jnp.concatenate([one * cos - two * sin, two * cos + one * sin], -1)


def check(overrides, like=None, **where):
    model, params, batch = problem(overrides)
    loss, gradients = md.jit(gradient_step(model), **where)(params, batch)
    wanted_loss, wanted = expected(like or overrides)
    # The tables of rotary positions are float32.
    np.testing.assert_allclose(loss, wanted_loss, rtol=1e-6)
    found = by_path(gradients)
    assert found.keys() == wanted.keys()
    for path, gradient in found.items():
        np.testing.assert_allclose(gradient, wanted[path], rtol=1e-4, atol=1e-6, err_msg=path)


@pytest.mark.long
@pytest.mark.parametrize("variant", VARIANTS)
def test_loss_and_gradients_unsharded(variant):
    check(VARIANTS[variant], backend="numpy")


# Layouts with and without a split length in turn.
@pytest.mark.long
@pytest.mark.parametrize(
    ("variant", "layout"),
    list(zip(VARIANTS, itertools.cycle([TENSOR, f"{TENSOR}; length:model?"]), strict=False)),
)
def test_loss_and_gradients_split_by_batch_and_tensor(variant, layout):
    check(VARIANTS[variant], mesh="data:2,model:4", layout=layout, backend="numpy")


@pytest.mark.long
def test_the_jax_backend_agrees_on_a_mesh():
    variant = VARIANTS["grouped queries, gated, untied"]
    check(variant, mesh="data:2,model:4", layout=f"{TENSOR}; length:model?")


@pytest.mark.long
@pytest.mark.parametrize(
    "remat", ["full", "dots", "names:attention_out+mlp_hidden", "keep_collectives"]
)
def test_layers_scanned_with_rematerialisation_give_the_same(remat):
    changes = f"{TINY},remat={remat}"
    check(changes, like=TINY, mesh="data:2,model:4", layout=TENSOR, backend="numpy")


def computed_again(remat, overrides=TINY):
    """Returns what the loop of the backward pass has of the forward one, and the bytes kept."""
    model, params, batch = problem(overrides)
    model = model.with_overrides(f"remat={remat}")
    program = md.jit(gradient_step(model), backend="numpy").lower(params, batch)
    forward, backward = (i for i in program.block.instructions if i.op == "scan")
    again = [i.op for i in backward.body.instructions if not i.source.backward]
    stacked = sum(v.shape.volume * v.dtype.itemsize for v in forward.outputs[1:])
    return {name: again.count(name) for name in ("einsum", "attention", "tanh")}, stacked


def test_each_policy_computes_again_what_it_does_not_keep():
    """A block has six products: three before attention, one after, two in the MLP."""
    tokens, embed, d_ff, number, sums = 2 * 4 * 8, 16, 32, 8, 4 * 8
    stream = tokens * embed * number  # of both layers

    assert computed_again("none")[0] == {"einsum": 0, "attention": 0, "tanh": 0}
    # The last product of a block is read by nothing in its backward pass.
    assert computed_again("full") == ({"einsum": 5, "attention": 1, "tanh": 1}, stream)
    hidden = tokens * d_ff * number
    kept = {"einsum": 4, "attention": 1, "tanh": 1}
    assert computed_again("names:mlp_hidden") == (kept, stream + hidden)
    # With the result of attention goes the log-sum-exp of its rows.
    kept = {"einsum": 5, "attention": 0, "tanh": 1}
    assert computed_again("names:attention_out") == (kept, 2 * stream + tokens * sums)
    # Queries, keys, values, what attention leaves, its projection, and the hidden layer.
    kept = {"einsum": 0, "attention": 0, "tanh": 1}
    assert computed_again("dots") == (kept, 6 * stream + hidden + tokens * sums)


def test_every_name_that_may_be_kept_is_there():
    gated = f"{TINY},mlp=swiglu"
    for name in NAMES:
        less, more = (computed_again(remat, gated)[1] for remat in ("full", f"names:{name}"))
        assert more > less or name == "mlp_added"  # that one nothing reads


def test_a_name_that_is_not_there_is_told():
    model, params, batch = problem(TINY)
    model = model.with_overrides("remat=names:attention_ot+mine")
    with pytest.raises(ValueError) as error:
        md.jit(gradient_step(model)).trace(params, batch)
    text = str(error.value)
    assert "nothing in block is named 'attention_ot'. Did you mean `attention_out`" in text
    assert "nothing in block is named 'mine'; its names: attention_added, attention_key," in text


def test_rematerialisation_keeps_only_what_enters_each_layer():
    def stacked(overrides):
        model, params, batch = problem(overrides)
        graph = md.jit(gradient_step(model)).trace(params, batch)
        (forward, _) = (op for op in graph.operations if op.name == "scan")
        return sum(t.bytes for t in forward.outputs[1:])

    stream = 2 * 4 * 8 * 16 * 8  # layers, batch, length, embed, bytes
    assert stacked(f"{TINY},remat=full") == stream
    assert stacked(TINY) > 3 * stream


def test_parameter_paths_read_well():
    model = models.load("gpt_mini", "tied=false,positions=learned,bias=true,norm=layer")
    graph = md.jit(model.init).trace(md.random.key(0))
    dims = {p: t.dims.names for p, t in zip(graph.output_paths, graph.outputs, strict=True)}
    assert dims["embedding"] == ("vocab", "embed")
    assert dims["positions"] == ("max_length", "embed")
    assert dims["blocks/attention/query"] == ("layers", "embed", "heads", "kv")
    assert dims["blocks/attention/out"] == ("layers", "heads", "kv", "embed")
    assert dims["blocks/attention/key_bias"] == ("layers", "heads", "kv")
    assert dims["blocks/mlp/w_in"] == ("layers", "embed", "d_ff")
    assert dims["blocks/mlp/w_out"] == ("layers", "d_ff", "embed")
    assert dims["blocks/mlp_norm/scale"] == ("layers", "embed")
    assert dims["final_norm/bias"] == ("embed",)
    assert dims["unembedding"] == ("embed", "vocab")


def test_grouped_queries_have_a_dim_of_their_own():
    model = models.load("gpt_mini", "kv_heads=2")
    shapes = jax.tree.leaves(md.jit(model.init).trace(md.random.key(0)).outputs)
    query = next(t for t in shapes if t.dims.find("group"))
    assert str(query.dims) == "[layers=4, embed=256, heads=2, group=4, kv=32]"


def test_the_initial_loss_is_that_of_a_uniform_guess():
    model = models.load("gpt_mini", "layers=2,embed=64")
    rng = np.random.default_rng(0)
    batch = {
        name: md.named(rng.integers(0, 256, (4, 32)).astype("int32"), spec.dims)
        for name, spec in model.batch_spec(4, 32).items()
    }
    loss = md.jit(lambda key, batch: model.loss(model.init(key), batch))(md.random.key(1), batch)
    assert float(loss) == pytest.approx(np.log(256), abs=0.1)


def test_the_policy_decides_the_dtypes():
    model = models.load("gpt_mini", "policy.compute=bfloat16")
    spec = model.batch_spec(2, 8)
    graph = md.jit(lambda key, batch: gradient_step(model)(model.init(key), batch)).trace(
        md.random.key(0), spec
    )
    assert {t.dtype.name for t in graph.outputs} == {"float32"}
    (forward, _) = (op for op in graph.operations if op.name == "scan")
    body = forward.params["body"].operations
    assert {op.outputs[0].dtype.name for op in body if op.name == "einsum"} == {"bfloat16"}


def test_a_text_longer_than_the_learned_positions_is_an_error():
    model = models.load("gpt_mini", "positions=learned,max_length=64")
    assert model.length == 64
    with pytest.raises(ValueError, match="length=65 is more than the max_length=64 learned posit"):
        md.jit(lambda key, batch: model.loss(model.init(key), batch)).trace(
            md.random.key(0), model.batch_spec(2, 65)
        )
