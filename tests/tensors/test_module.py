"""Module: a dataclass that is a pytree, and the paths of its leaves."""

import dataclasses

import jax
import numpy as np
import pytest

import meshdsl as md
from meshdsl.tensors.module import path_of

a, b = md.dims(a=2, b=3)


class Linear(md.Module):
    weight: md.NamedArray
    bias: md.NamedArray | None = None
    activation: str = md.static(default="tanh")

    def __call__(self, x):
        y = md.einsum(x, self.weight, over="a")
        y = y if self.bias is None else y + self.bias
        return getattr(md, self.activation)(y)


class Model(md.Module):
    layers: list[Linear]
    scale: md.NamedArray


def model():
    linear = Linear(md.named(np.ones((2, 3)), [a, b]), md.named(np.zeros(3), [b]))
    return Model([linear, linear.replace(activation="sin", bias=None)], md.named(np.ones(()), []))


def test_leaves_have_paths_of_fields_and_positions():
    keyed, _ = jax.tree_util.tree_flatten_with_path(
        model(), is_leaf=lambda x: isinstance(x, md.NamedArray)
    )
    assert [path_of(keys, "model") for keys, _ in keyed] == [
        "model/layers/0/weight",
        "model/layers/0/bias",
        "model/layers/1/weight",
        "model/scale",
    ]


def test_static_fields_belong_to_the_structure():
    linear = model().layers[0]
    assert jax.tree.structure(linear) != jax.tree.structure(linear.replace(activation="sin"))
    assert "tanh" not in map(str, jax.tree.leaves(linear))


def test_a_module_is_frozen_and_replace_copies():
    linear = model().layers[0]
    with pytest.raises(dataclasses.FrozenInstanceError):
        linear.weight = None
    assert linear.replace(activation="sin").activation == "sin"
    assert linear.activation == "tanh"


def test_modules_are_arguments_and_results_and_keep_their_paths():
    def step(model, x):
        def loss(model):
            return md.sum(model.layers[0](x)) * model.scale

        return jax.tree.map(lambda w, g: w - 0.1 * g, model, md.grad(loss)(model))

    x = md.named(np.ones(2), [a])
    jitted = md.jit(step, backend="numpy")
    graph = jitted.trace(model(), x)
    assert graph.input_paths[:2] == ("model/layers/0/weight", "model/layers/0/bias")
    leaves = ("layers/0/weight", "layers/0/bias", "layers/1/weight", "scale")
    assert graph.output_paths == tuple(f"model/{leaf}" for leaf in leaves)
    stepped = jitted(model(), x)
    assert isinstance(stepped, Model)
    assert np.array_equal(stepped.layers[1].weight, model().layers[1].weight)
    slope = 1 - np.tanh(2.0) ** 2
    assert np.allclose(stepped.layers[0].bias, -0.1 * slope, rtol=1e-12)


def test_init_functions_are_traced():
    def init(key):
        return Linear(md.random.normal(key, [a, b]))

    linear = md.jit(init, mesh="x:2", layout="a:x")(md.random.key(0))
    assert str(linear.weight.layout) == "a:x"
    assert np.asarray(linear.weight).std() > 0
