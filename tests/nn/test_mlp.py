"""Feed-forward layers, against jax.numpy in float64."""

import jax
import numpy as np

import meshdsl as md
from meshdsl import nn

RNG = np.random.default_rng(0)
X = RNG.normal(size=(4, 6, 8))
W_IN, W_GATE = RNG.normal(size=(2, 8, 16))
W_OUT, BIAS_IN, BIAS_OUT = (RNG.normal(size=s) for s in ((16, 8), (16,), (8,)))
INTO, BACK = ["embed", "d_ff"], ["d_ff", "embed"]


def named(*pairs):
    return [md.named(array, dims) for array, dims in pairs]


def test_mlp_with_biases():
    found = md.jit(lambda x, a, b, c, d: nn.mlp(x, a, b, c, d))(
        *named((X, ["batch", "length", "embed"]), (W_IN, INTO), (W_OUT, BACK)),
        *named((BIAS_IN, ["d_ff"]), (BIAS_OUT, ["embed"])),
    )
    expected = jax.nn.gelu(X @ W_IN + BIAS_IN) @ W_OUT + BIAS_OUT
    np.testing.assert_allclose(found, expected, rtol=1e-10)


def test_mlp_over_dims_of_other_names_with_another_activation():
    found = md.jit(lambda x, a, b: nn.mlp(x, a, b, over="c", hidden="h", activation=md.relu))(
        *named((X, ["batch", "length", "c"]), (W_IN, ["c", "h"]), (W_OUT, ["h", "c"]))
    )
    np.testing.assert_allclose(found, np.maximum(X @ W_IN, 0) @ W_OUT, rtol=1e-10)


def test_gated_mlp():
    found = md.jit(lambda *args: nn.gated_mlp(*args), mesh="model:4", layout="d_ff:model")
    arguments = named((X, ["batch", "length", "embed"]), (W_GATE, INTO), (W_IN, INTO))
    gate = X @ W_GATE
    expected = (gate / (1 + np.exp(-gate)) * (X @ W_IN)) @ W_OUT
    np.testing.assert_allclose(found(*arguments, *named((W_OUT, BACK))), expected, rtol=1e-10)
