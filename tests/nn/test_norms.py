"""Norms, against numpy in float64."""

import numpy as np

import meshdsl as md
from meshdsl import nn

RNG = np.random.default_rng(0)
X, SCALE, BIAS = RNG.normal(3, 2, (4, 6, 8)), RNG.normal(size=8), RNG.normal(size=8)


def run(function, *arrays, **where):
    dims = (["batch", "length", "embed"], ["embed"], ["embed"])
    named = [md.named(a, d) for a, d in zip(arrays, dims, strict=False)]
    return md.jit(function, **where)(*named)


def layer_norm(x, scale=1.0, bias=0.0, eps=1e-5):
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + eps) * scale + bias


def rms_norm(x, scale=1.0, eps=1e-6):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * scale


def test_rms_norm():
    found = run(lambda x, scale: nn.rms_norm(x, "embed", scale), X, SCALE)
    np.testing.assert_allclose(found, rms_norm(X, SCALE), rtol=1e-12)


def test_layer_norm():
    found = run(lambda x, scale, bias: nn.layer_norm(x, "embed", scale, bias), X, SCALE, BIAS)
    np.testing.assert_allclose(found, layer_norm(X, SCALE, BIAS), rtol=1e-12, atol=1e-14)


def test_scale_and_bias_may_be_left_out_and_eps_chosen():
    found = run(lambda x: (nn.layer_norm(x, "embed", eps=0.1), nn.rms_norm(x, "embed", eps=0.1)), X)
    np.testing.assert_allclose(found[0], layer_norm(X, eps=0.1), rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(found[1], rms_norm(X, eps=0.1), rtol=1e-12)


def test_several_dims_are_normalised_together():
    found = run(lambda x: nn.rms_norm(x, ["length", "embed"]), X)
    np.testing.assert_allclose(found, rms_norm(X.reshape(4, 48)).reshape(X.shape), rtol=1e-12)


def test_a_split_dim_gives_the_same():
    found = run(
        lambda x, scale, bias: nn.layer_norm(x, "embed", scale, bias),
        *(X, SCALE, BIAS),
        mesh="data:2,model:4",
        layout="batch:data; embed:model",
        backend="numpy",
    )
    np.testing.assert_allclose(found, layer_norm(X, SCALE, BIAS), rtol=1e-12, atol=1e-14)


def test_half_precision_keeps_its_dtype_and_wide_statistics():
    x = (1000 + np.arange(512.0))[None, None]
    found = run(lambda x: nn.layer_norm(md.cast(x, "bfloat16"), "embed"), x)
    assert found.dtype.name == "bfloat16"
    rounded = np.asarray(run(lambda x: md.cast(md.cast(x, "bfloat16"), "float64"), x))
    np.testing.assert_allclose(
        np.asarray(found).astype("float64"), layer_norm(rounded), rtol=2**-8, atol=1e-6
    )
