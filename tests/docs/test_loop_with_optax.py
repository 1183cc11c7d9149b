"""The loop with optax that a page shows computes what one device does."""

import numpy as np
import optax

import meshdsl as md
from tests.docs.test_code import GUIDES, names_of


def test_a_loop_with_optax_has_the_losses_of_one_device():
    """The program's own values, on a mesh and in `jax.jit`, against a loop without a mesh."""
    names = names_of(GUIDES / "programs.md")
    value_and_grad, x = md.jit(md.value_and_grad(names["loss"])), names["x"]
    params, tx = dict(names["begin"]), names["tx"]
    state = tx.init(params)
    for _ in range(5):
        value, grads = value_and_grad(params, x)
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
    np.testing.assert_allclose(float(names["value"]), float(value), rtol=1e-5)
    slopes = value_and_grad(params, x)[1]["w_in"]
    largest = np.abs(slopes).max()
    np.testing.assert_allclose(names["slopes"]["w_in"], slopes, rtol=1e-3, atol=1e-3 * largest)
