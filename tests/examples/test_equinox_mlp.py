"""The step of Equinox and optax has JAX's losses on every layout, and the weights go back."""

import jax
import numpy as np
import pytest

import meshdsl as md
from tests.examples.programs import load, printed

eqx = pytest.importorskip("equinox")
LAYOUTS = [
    "batch:data; hidden:model",
    pytest.param("batch:data; params/pixel:data; hidden:model", marks=pytest.mark.long),
]


@pytest.mark.long
@pytest.mark.parametrize("layout", LAYOUTS)
def test_losses_and_weights_are_those_of_jax(layout):
    example = load("equinox_mlp")
    model = eqx.nn.MLP(64, 10, width_size=128, depth=1, key=jax.random.key(0))
    step = md.jit(md.from_equinox(example.train_step, example.NAMES), "data:2,model:4", layout)
    trained, losses = example.train(step, model, 6)
    plain, expected = example.train(eqx.filter_jit(example.train_step), model, 6)
    np.testing.assert_allclose(losses, expected, rtol=1e-4)
    image = example.digits()[0][0]
    np.testing.assert_allclose(md.unnamed(trained)(image), plain(image), atol=1e-3)


@pytest.mark.long
def test_it_recognises_digits(monkeypatch, capsys):
    layout = ("--mesh_shape=data:2,model:4", "--layout=batch:data;hidden:model")
    lines = printed(load("equinox_mlp"), monkeypatch, capsys, *layout)
    assert lines["a weight"] == "[hidden=128, pixel=64]"
    found, expected = lines["loss"].split(" to ")[1].split(";")[0], lines["loss"].split(" to ")[-1]
    assert abs(float(found) - float(expected)) < 1e-3
    assert float(lines["accuracy on held-out digits"]) > 0.8
