"""The step of nnx has its losses on every layout, and the model goes back to nnx."""

import numpy as np
import pytest

import meshdsl as md
from tests.examples.programs import load, printed

nnx = pytest.importorskip("flax.nnx")
LAYOUTS = [
    "batch:data; hidden:model",
    pytest.param("batch:data; model/pixel:data; hidden:model", marks=pytest.mark.long),
]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_losses_and_weights_are_those_of_nnx(layout):
    example = load("flax_nnx")
    program = md.from_jax(example.train_step, example.NAMES)
    model, losses = example.train(md.jit(program, "data:2,model:4", layout), 6)
    plain, expected = example.train(nnx.jit(example.train_step), 6)
    np.testing.assert_allclose(losses, expected, rtol=1e-4)
    image = example.digits()[0][:4]
    found = md.unnamed(model)(image)
    np.testing.assert_allclose(found, plain(image), atol=1e-3)


@pytest.mark.long
def test_it_recognises_digits(monkeypatch, capsys):
    layout = ("--mesh_shape=data:2,model:4", "--layout=batch:data;hidden:model")
    lines = printed(load("flax_nnx"), monkeypatch, capsys, *layout)
    assert lines["a weight"] == "[pixel=64, hidden=128]"
    found, expected = lines["loss"].split(" to ")[1].split(";")[0], lines["loss"].split(" to ")[-1]
    assert abs(float(found) - float(expected)) < 1e-3
    assert float(lines["accuracy on held-out digits"]) > 0.8
