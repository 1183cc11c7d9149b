"""Activation functions against JAX's, with two derivatives."""

import jax
import numpy as np
import pytest

import meshdsl as md
from tests.ops.agreement import assert_agree, assert_close, random, run

a, b = md.dims(a=4, b=3)

REFERENCES = {  # ours: (JAX's, low, high)
    "relu": (jax.nn.relu, -2, 2),
    "relu6": (jax.nn.relu6, -3, 9),
    "leaky_relu": (jax.nn.leaky_relu, -2, 2),
    "elu": (jax.nn.elu, -3, 3),
    "celu": (jax.nn.celu, -3, 3),
    "selu": (jax.nn.selu, -3, 3),
    "gelu": (jax.nn.gelu, -3, 3),
    "silu": (jax.nn.silu, -3, 3),
    "softplus": (jax.nn.softplus, -30, 30),
    "log_sigmoid": (jax.nn.log_sigmoid, -30, 30),
    "mish": (jax.nn.mish, -3, 3),
    "softsign": (jax.nn.soft_sign, -3, 3),
    "hard_tanh": (jax.nn.hard_tanh, -2, 2),
    "hard_sigmoid": (jax.nn.hard_sigmoid, -5, 5),
    "hard_silu": (jax.nn.hard_silu, -5, 5),
}


@pytest.mark.long
@pytest.mark.parametrize("name", REFERENCES)
def test_values_and_two_derivatives(name):
    reference, low, high = REFERENCES[name]
    assert_agree(getattr(md, name), reference, random([a, b], low, high), order=2)


@pytest.mark.long
def test_their_parameters():
    x = random([a, b], -3, 3)
    pairs = [
        (lambda x: md.gelu(x, approximate=False), lambda x: jax.nn.gelu(x, approximate=False)),
        (lambda x: md.leaky_relu(x, 0.3), lambda x: jax.nn.leaky_relu(x, 0.3)),
        (lambda x: md.elu(x, 0.5), lambda x: jax.nn.elu(x, 0.5)),
        (lambda x: md.celu(x, 0.5), lambda x: jax.nn.celu(x, 0.5)),
    ]
    for ours, theirs in pairs:
        assert_agree(ours, theirs, x, order=2)
    slope = random([b], seed=1)
    assert_agree(md.leaky_relu, lambda x, s: jax.numpy.where(x > 0, x, s * x), x, slope)


@pytest.mark.parametrize("name", REFERENCES)
def test_large_inputs_do_not_overflow(name):
    x = md.named(np.array([-1e4, 1e4, 0.0, -0.0]), [a])
    reference = REFERENCES[name][0]
    assert_close(run(getattr(md, name), x), reference(x.data))
    slope = run(md.grad(lambda x: md.sum(getattr(md, name)(x))), x)
    assert np.isfinite(slope).all()


@pytest.mark.long
def test_slopes_where_two_branches_meet():
    """Zeros are what many tensors start as; JAX halves the curvature of celu there."""
    x = md.named(np.zeros(4), [a])
    for name in ("relu", "relu6", "elu", "selu", "softplus", "log_sigmoid", "mish", "hard_silu"):
        assert_agree(getattr(md, name), REFERENCES[name][0], x, order=2)
    assert_agree(md.celu, jax.nn.celu, x)


@pytest.mark.parametrize("name", REFERENCES)
def test_nan_is_not_hidden(name):
    assert np.isnan(run(getattr(md, name), md.named(np.full(4, np.nan), [a]))).all()
