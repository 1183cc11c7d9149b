"""The example has the losses of the same model in plain JAX with optax, on every layout."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.examples.programs import load, printed

STEPS = 6
MESH, LAYOUT = "data:2,model:4", "batch:data;hidden:model;optimizer/pixel:data"


def losses_of_jax(example):
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))
    params = {name: jnp.asarray(w.data) for name, w in example.init().items()}

    @jax.jit
    def step(params, state, image, label):
        def loss(params):
            logits = jax.nn.gelu(image @ params["w_in"]) @ params["w_out"]
            return optax.softmax_cross_entropy_with_integer_labels(logits, label).mean()

        value, grads = jax.value_and_grad(loss)(params)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    state, losses = optimizer.init(params), []
    for image, label in example.digits(STEPS):
        params, state, value = step(params, state, image.data, label.data)
        losses.append(float(value))
    return losses


@pytest.mark.parametrize(("mesh", "layout"), [(None, None), (MESH, LAYOUT)])
def test_losses_are_those_of_plain_jax(mesh, layout):
    example = load("optax_pytree")
    _, losses = example.train(mesh, layout, STEPS)
    np.testing.assert_allclose(losses, losses_of_jax(example), rtol=1e-4)


def test_the_state_lies_in_shards_and_the_loss_falls(monkeypatch, capsys):
    arguments = (f"--mesh_shape={MESH}", f"--layout={LAYOUT}", "--steps=30")
    lines = printed(load("optax_pytree"), monkeypatch, capsys, *arguments)
    assert lines["first moment of w_in"] == "hidden:model; pixel:data"
    first, last = map(float, lines["loss"].split(" to "))
    assert last < 0.5 * first
