"""Norms, against numpy in float64."""

import numpy as np
import pytest

import meshdsl as md
from meshdsl import nn
from tests.lowering.plans import lowered
from tests.ops.agreement import message, random

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


def test_group_norm():
    scale, bias = RNG.normal(size=6), RNG.normal(size=6)
    x = X.transpose(0, 2, 1)  # batch, place, channels
    named = [md.named(a, d) for a, d in ((x, ["batch", "place", "c"]), (scale, "c"), (bias, "c"))]
    found = md.jit(lambda x, s, b: nn.group_norm(x, "place", "c", 3, s, b))(*named)
    parts = x.reshape(4, 8, 3, 2)
    centred = parts - parts.mean((1, 3), keepdims=True)
    y = centred / np.sqrt(parts.var((1, 3), keepdims=True) + 1e-5)
    np.testing.assert_allclose(found, y.reshape(x.shape) * scale + bias, rtol=1e-11, atol=1e-12)
    assert "c=6 channels do not divide into 4 groups" in message(
        lambda x: nn.group_norm(x, "place", "c", 4), named[0]
    )


@pytest.mark.parametrize(
    ("channels", "groups", "devices"),
    [
        (32, 8, 4),
        (32, 4, 4),
        (32, 2, 4),
        (32, 1, 4),
        (24, 3, 4),
        (18, 6, 4),
        (10, 5, 4),
        (12, 4, 5),
    ],
)
def test_a_group_norm_over_split_channels_moves_no_activations(channels, groups, devices):
    dims = md.dims(batch=2, place=6, channels=channels)

    def norm(x):
        return nn.group_norm(x, "place", "channels", groups)

    def loss(x):
        return md.sum(md.sin(norm(x)))

    for function in (norm, md.grad(loss)):
        layout, mesh = "channels:model", f"model:{devices}"
        program = lowered(function, random(dims), layout=layout, mesh=mesh)
        assert not [str(c) for c in program.collectives if "place" in str(c.dims)]


@pytest.mark.parametrize(("channels", "groups"), [(32, 8), (24, 3), (10, 5)])
def test_a_group_norm_over_channels_alone_is_the_same_where_they_are_split(channels, groups):
    dims = md.dims(batch=6, channels=channels)

    def loss(x):
        return md.sum(md.sin(nn.group_norm(x, [], "channels", groups)))

    lowered(md.value_and_grad(loss), random(dims), layout="channels:model", mesh="model:4")


def test_a_group_norm_sends_nothing_where_devices_have_groups_of_their_own():
    dims = md.dims(batch=2, place=6, channels=32)

    def norm(x):
        return nn.group_norm(x, "place", "channels", 8)

    for function in (norm, md.grad(lambda x: md.sum(md.sin(norm(x))))):
        program = lowered(function, random(dims), layout="channels:model", mesh="model:4")
        assert program.wire_bytes == 0


def test_batch_norm_takes_the_statistics_of_its_batch_or_is_given_some():
    over = ["batch", "length"]

    def both(x, scale, bias, mean, variance):
        y, found = nn.batch_norm(x, over, scale, bias)
        given, same = nn.batch_norm(x, over, scale, bias, statistics=(mean, variance))
        return y, found, given, same

    mean, variance = RNG.normal(size=8), RNG.uniform(1, 2, 8)
    arrays = [X, SCALE, BIAS, mean, variance]
    named = [md.named(a, ["batch", "length", "embed"][-a.ndim :]) for a in arrays]
    for where in ({}, {"mesh": "data:2", "layout": "batch:data", "backend": "numpy"}):
        y, found, given, same = md.jit(both, **where)(*named)
        own = X.mean((0, 1)), X.var((0, 1))
        for one, other in zip((*found, *same), (*own, mean, variance), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-12)
        for one, (m, v) in ((y, own), (given, (mean, variance))):
            expected = (X - m) / np.sqrt(v + 1e-5) * SCALE + BIAS
            np.testing.assert_allclose(one, expected, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize(
    ("channels", "groups", "devices"), [(32, 2, 8), (24, 3, 4), (18, 6, 4), (12, 4, 5)]
)
def test_a_group_norm_sends_4_sums_per_group_where_groups_straddle(channels, groups, devices):
    dims = md.dims(batch=2, place=6, channels=channels)

    def norm(x):
        return nn.group_norm(x, "place", "channels", groups)

    program = lowered(
        md.grad(lambda x: md.sum(md.sin(norm(x)))),
        random(dims),
        layout="channels:model",
        mesh=f"model:{devices}",
    )
    sums = 2 * groups * 8  # of each batch and group, float64
    assert program.wire_bytes == pytest.approx(4 * 2 * (devices - 1) / devices * sums)
