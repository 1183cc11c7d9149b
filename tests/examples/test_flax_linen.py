"""The step of Flax and optax has JAX's losses on every layout, and the weights go back to Flax."""

import jax
import numpy as np
import pytest

import meshdsl as md
from tests.examples.programs import load, printed

pytest.importorskip("flax")
LAYOUTS = [
    "batch:data; hidden:model",
    pytest.param("batch:data; params/pixel:data; hidden:model", marks=pytest.mark.long),
]


@pytest.mark.long
@pytest.mark.parametrize("layout", LAYOUTS)
def test_losses_and_weights_are_those_of_jax(layout):
    example = load("flax_linen")
    program = md.from_jax(example.train_step, example.NAMES)
    params, losses = example.train(md.jit(program, "data:2,model:4", layout), 6)
    plain, expected = example.train(jax.jit(example.train_step), 6)
    np.testing.assert_allclose(losses, expected, rtol=1e-4)
    image = example.digits()[0][:4]
    found = example.MODEL.apply(md.unnamed(params), image)
    np.testing.assert_allclose(found, example.MODEL.apply(plain, image), atol=1e-3)


@pytest.mark.long
def test_it_recognises_digits(monkeypatch, capsys):
    layout = ("--mesh_shape=data:2,model:4", "--layout=batch:data;hidden:model")
    lines = printed(load("flax_linen"), monkeypatch, capsys, *layout)
    assert lines["a weight"] == "[pixel=64, hidden=128]"
    found, expected = lines["loss"].split(" to ")[1].split(";")[0], lines["loss"].split(" to ")[-1]
    assert abs(float(found) - float(expected)) < 1e-3
    assert float(lines["accuracy on held-out digits"]) > 0.8
