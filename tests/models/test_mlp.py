"""The classifier, against jax.numpy in float64, and learning to tell digits apart."""

import jax
import numpy as np
import pytest

import meshdsl as md
from meshdsl.models.mlp import MLPConfig, classifier

SMALL = MLPConfig(features=16, hidden=32, layers=2, classes=8)
RNG = np.random.default_rng(0)
INPUTS, LABELS = RNG.normal(size=(8, 16)).astype("float32"), RNG.integers(0, 8, 8).astype("int32")
BATCH = {"inputs": md.named(INPUTS, ["batch", "features"]), "labels": md.named(LABELS, ["batch"])}


def reference(p):
    x = jax.nn.relu(INPUTS @ p.w_in.data + p.bias_in.data)
    for weights, bias in zip(p.w_hidden.data, p.bias_hidden.data, strict=True):
        x = jax.nn.relu(x @ weights + bias)
    scores = jax.nn.log_softmax(x @ p.w_out.data + p.bias_out.data)
    return -scores[np.arange(8), LABELS].mean()


@pytest.mark.long
@pytest.mark.parametrize(
    "where",
    [
        {},
        {"mesh": "data:2,model:4", "layout": "batch:data; hidden:model; classes:model?"},
        {"mesh": "data:2,model:4", "layout": "batch:data; next_hidden:model", "backend": "numpy"},
    ],
)
def test_loss_and_gradients(where):
    model = classifier(SMALL)
    params = md.jit(model.init)(md.random.key(0))
    loss, gradients = md.jit(
        lambda params, batch: md.value_and_grad(model.loss)(params, batch), **where
    )(params, BATCH)
    expected_loss, expected = jax.value_and_grad(reference)(params)
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)
    for found, wanted in zip(jax.tree.leaves(gradients), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(found, wanted, atol=1e-6)


def test_its_batches_fit_its_loss():
    model = classifier(SMALL).with_overrides("classes=4,layers=3")
    spec = model.batch_spec(8, 1)
    graph = md.jit(lambda key, batch: model.loss(model.init(key), batch)).trace(
        md.random.key(0), spec
    )
    assert str(graph.outputs[0]) == "f32[]"
    assert str(spec["labels"]) == "s32[batch=8]"


def test_sizes_below_one_are_told_together():
    with pytest.raises(ValueError) as caught:
        MLPConfig(features=0, layers=-1)
    assert str(caught.value) == (
        "features=0: needs to be at least 1; layers=-1: needs to be at least 1"
    )
