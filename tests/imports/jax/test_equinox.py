"""`md.from_equinox`: functions of models, with what is no array in arguments and results."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import meshdsl as md
from meshdsl import optim
from meshdsl.training import Recipe, train

eqx = pytest.importorskip("equinox")
MESH, LAYOUT = "data:2,model:4", "batch:data; hidden:model"
X = np.random.default_rng(0).normal(size=(8, 16)).astype("float32")
NAMES = {"x": "batch feature", "net/first/weight": "hidden _"}
OPTIMIZER = optax.adamw(1e-2)


class Net(eqx.Module):
    """Has a state, a number, a table of integers and functions among its leaves."""

    first: eqx.nn.Linear
    norm: eqx.nn.BatchNorm
    dropout: eqx.nn.Dropout
    last: eqx.nn.MLP
    table: jax.Array
    scale: float = 0.5

    def __init__(self, key):
        first, last = jax.random.split(key)
        self.first = eqx.nn.Linear(16, 32, key=first)
        self.norm = eqx.nn.BatchNorm(32, "batch", mode="batch")
        self.dropout = eqx.nn.Dropout(0.5)
        self.last = eqx.nn.MLP(32, 4, width_size=8, depth=1, key=last)
        self.table = jnp.arange(4)

    def __call__(self, x, state, key):
        x, state = self.norm(self.first(x), state)
        return self.last(self.dropout(x, key=key)) * self.scale + self.table, state


def loss(net, state, x, key):
    keys = jax.random.split(key, len(x))
    run = jax.vmap(net, axis_name="batch", in_axes=(0, None, 0), out_axes=(0, None))
    y, state = run(x, state, keys)
    return jnp.mean(y**2), state


def step(net, state, kept, x, key):
    (value, state), grads = eqx.filter_value_and_grad(loss, has_aux=True)(net, state, x, key)
    updates, kept = OPTIMIZER.update(grads, kept, eqx.filter(net, eqx.is_inexact_array))
    return eqx.apply_updates(net, updates), state, kept, value


def assert_close(found, expected):
    """Asserts that trees are equal, what is no array exactly."""
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for mine, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        if eqx.is_array(theirs):
            np.testing.assert_allclose(mine, theirs, rtol=2e-4, atol=1e-5)
        else:
            assert mine is theirs or mine == theirs


@pytest.mark.long
@pytest.mark.parametrize("layout", [LAYOUT, "feature:data; hidden:model", "batch:data+model", ""])
def test_steps_of_a_whole_model_are_those_of_filter_jit(layout):
    key = jax.random.key(1)
    net, state = eqx.nn.make_with_state(Net)(jax.random.key(0))
    given = net, state, OPTIMIZER.init(eqx.filter(net, eqx.is_inexact_array))
    run = md.jit(md.from_equinox(step, NAMES), MESH, layout)
    plain = eqx.filter_jit(step)
    mine = theirs = given
    for n in range(3):
        *mine, value = run(*mine, X, jax.random.fold_in(key, n))
        *theirs, expected = plain(*theirs, X, jax.random.fold_in(key, n))
        np.testing.assert_allclose(float(value), expected, rtol=1e-4)
    assert_close(md.unnamed(mine), theirs)


def test_what_is_no_array_is_static_in_arguments_and_results():
    traced = []

    def repeat(net, x, times, how="add"):
        traced.append((times, how))
        for _ in range(times):
            x = x + 1 if how == "add" else x * 2
        return {"x": x, "times": times, "how": how, "net": net}

    run = md.jit(md.from_equinox(repeat, {"x": "row"}))
    x = np.ones(4, "float32")
    result = md.unnamed(run(jnp.tanh, x, 2))
    assert (result["times"], result["how"], result["net"]) == (2, "add", jnp.tanh)
    np.testing.assert_array_equal(result["x"], x + 2)
    named = md.named(x, ["row"])
    np.testing.assert_array_equal(md.unnamed(run(None, named, 3, how="double")["x"]), x * 8)
    before = len(traced)
    run(None, named, 3, how="double")
    assert len(traced) == before
    assert md.unnamed(run(None, named, True, how="double"))["times"] is True
    assert md.unnamed(run(None, named, 1, how="double"))["times"] == 1  # no True, though equal


def test_gradients_are_whole_models_too():
    net = eqx.nn.MLP(16, 4, width_size=32, depth=1, key=jax.random.key(0))
    program = md.from_equinox(lambda net, x: jnp.mean(jax.vmap(net)(x) ** 2), {"x": "batch _"})
    value, grads = md.jit(md.value_and_grad(program), MESH, "batch:data")(net, X)
    expected = jax.grad(
        lambda w: program.function(eqx.tree_at(lambda n: n.layers[0].weight, net, w), X)
    )
    np.testing.assert_allclose(
        md.unnamed(grads).layers[0].weight, expected(net.layers[0].weight), rtol=1e-4, atol=1e-6
    )
    assert np.isfinite(float(value))
    assert md.unnamed(grads).activation is net.activation  # as optimizers of the language want it


def test_the_state_of_optax_lies_like_the_model():
    def train(params, kept, x):
        grads = eqx.filter_grad(lambda net: jnp.mean(jax.vmap(net)(x) ** 2))(params)
        updates, kept = OPTIMIZER.update(grads, kept, eqx.filter(params, eqx.is_array))
        return eqx.apply_updates(params, updates), kept

    net = eqx.nn.MLP(16, 4, width_size=32, depth=1, key=jax.random.key(0))
    program = md.from_equinox(train, {"x": "batch feature", "params/layers/0/weight": "hidden _"})
    run = md.jit(program, MESH, "batch:data; params/hidden:data")
    params, kept = run(net, OPTIMIZER.init(eqx.filter(net, eqx.is_array)), X)
    found = [tree.layers[0].weight.layout for tree in (params, kept[0].mu, kept[0].nu)]
    assert list(map(str, found)) == ["hidden:data"] * 3


def test_residual_layers_take_back_the_names_that_they_were_given():
    layers = [eqx.nn.Linear(16, 16, key=key) for key in jax.random.split(jax.random.key(0), 2)]

    def residual(layers, x):
        for layer in layers:
            x = x + jax.nn.relu(jax.vmap(layer)(x))
        return layers, x

    program = md.from_equinox(residual, {"x": "batch embed"})
    given = program.named(layers, X)
    assert given[0][0].weight.dims.names == ("embed_out", "embed")
    run = md.jit(program, MESH, "batch:data; embed:model")
    again, first = run(layers, X)
    _, second = run(again, X)
    assert first.dims.names == second.dims.names == ("batch", "embed")
    np.testing.assert_array_equal(np.asarray(first), np.asarray(second))
    np.testing.assert_allclose(np.asarray(first), residual(layers, X)[1], rtol=1e-5, atol=1e-6)


def test_a_model_is_an_argument_and_not_the_function():
    net = eqx.nn.MLP(16, 4, width_size=32, depth=1, key=jax.random.key(0))
    for function in (net, net.__call__):
        with pytest.raises(ValueError, match="give a function of it: lambda model, x: model"):
            md.from_equinox(function)


def test_a_static_function_says_how_it_can_be_called():
    result = md.from_equinox(lambda net, x: net)(eqx.nn.MLP(4, 2, 8, 1, key=jax.random.key(0)), X)
    with pytest.raises(TypeError, match=r"md\.unnamed\(tree\) makes plain arrays"):
        result.activation(1.0)


def test_changes_in_place_that_are_lost_are_told():
    def change(net, x):
        net["w"] = net["w"] + 1
        return jnp.sum(x)

    with pytest.warns(UserWarning, match=r"in place \(net/w\) and does not return"):
        md.from_equinox(change)({"w": X, "name": "a"}, X)


def test_equal_layers_become_a_loop():
    keys = jax.random.split(jax.random.key(0), 4)
    layers = [eqx.nn.MLP(16, 16, 32, depth=1, key=key) for key in keys]

    def deep(layers, x):
        for layer in layers:
            x = x + jax.vmap(layer)(x)
        return jnp.mean(x**2)

    program = md.from_equinox(deep, {"x": "batch embed"}, roll="layers")
    x = X.astype(layers[0].layers[0].weight.dtype)  # all layers take and return what the first does
    stacked, named = program.named(layers, x)
    assert stacked[0].layers[0].weight.dims.names[0] == "layers"
    value = md.jit(program, MESH, "batch:data")(stacked, named)
    np.testing.assert_allclose(float(value), deep(layers, x), rtol=1e-5)
    assert_close(md.unnamed(program.unrolled(stacked)), layers)


def test_a_value_that_is_not_hashable_is_told_with_its_path():
    program = md.from_equinox(lambda net, x: x)
    message = "from_equinox: .*\n  net/table: set is no array, and not hashable\n  x/0: bytearray"
    with pytest.raises(ValueError, match=message):
        program({"table": {1}, "one": 1}, [bytearray(b"")])


@pytest.mark.long
def test_the_trainer_trains_a_whole_model_and_goes_on(tmp_path):
    def make(key):
        return eqx.nn.MLP(16, 4, width_size=32, depth=1, key=key)

    def compute(net, x):
        return jnp.mean((jax.vmap(net)(x) - 1) ** 2)

    program = md.from_equinox(compute, {"x": "batch feature", "net/layers/0/weight": "hidden _"})
    shapes = eqx.filter_eval_shape(make, jax.random.key(0))
    init = md.from_equinox(make, {"return": program.named(shapes, X)[0]})
    recipe = Recipe(init, lambda net, data: program(net, data["x"]), optim.AdamW(1e-2))

    def batches():
        while True:
            yield {"x": md.named(X, ["batch", "feature"])}

    def run(steps, workdir):
        return train(recipe, batches(), steps=steps, mesh=MESH, layout=LAYOUT, workdir=workdir)

    whole = run(6, tmp_path / "whole")
    run(3, tmp_path / "parts")
    parts = run(6, tmp_path / "parts")
    assert whole.losses[-1] == parts.losses[-1] < whole.losses[0]
    weight = parts.state.params.layers[0].weight
    assert (weight.dims.names, str(weight.layout)) == (("hidden", "feature"), "hidden:model")
    assert compute(md.unnamed(whole.state.params), X) < whole.losses[-1]
