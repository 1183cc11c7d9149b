"""Flops of one device: counted by hand, and against XLA's own count."""

import jax
import jax.numpy as jnp
import pytest

import meshdsl as md

layers, batch, embed, d_ff = md.dims(layers=3, batch=8, embed=16, d_ff=64)
X, W = md.spec([batch, embed]), md.spec([embed, d_ff])


def flops(function, *args, mesh=None, layout=None):
    return md.jit(function, mesh, layout).lower(*args).flops


def test_a_product_counts_two_per_multiplication_and_addition():
    assert flops(lambda x, w: md.einsum(x, w, over="embed"), X, W) == 2 * 8 * 16 * 64


def test_splitting_a_dim_divides_the_work():
    def f(x, w):
        return md.einsum(x, w, over="embed")

    assert flops(f, X, W, mesh="data:2 model:4", layout="batch:data; d_ff:model") == 2 * 4 * 16 * 16


def test_work_that_is_not_split_is_counted_on_every_device():
    assert flops(lambda x: x * x, X, mesh="data:2 model:4", layout="batch:data") == 4 * 16


def test_elementwise_and_reductions_count_one_per_element():
    assert flops(lambda x: md.exp(x) * 2 + 1, X) == 3 * 8 * 16
    assert flops(lambda x: md.sum(x, "embed"), X) == 8 * 16
    assert flops(lambda x: md.max(x), X) == 8 * 16


def test_moving_converting_and_choosing_count_nothing():
    def f(x):
        return md.cast(md.where(x > 0, x, 0).rename(embed="other"), "int32")

    assert flops(f, X) == 0


def test_a_scan_counts_every_iteration_on_every_level():
    inner = md.Dimension("steps", 5)

    def body(x, w):
        x, _ = md.scan(lambda x, _: (x * 2, None), x, None, dim=inner)
        return md.einsum(x, w, out=x.dims), None

    def f(x, w):
        return md.scan(body, x, w, dim="layers")[0]

    w = md.spec([layers, embed])
    assert flops(f, X, w) == 3 * (5 * 8 * 16 + 2 * 8 * 16)


@pytest.mark.parametrize("rows", [32, 512])
def test_the_gradient_of_a_network_counts_what_xla_counts(rows):
    batch, embed, d_ff = md.dims(batch=rows, embed=128, d_ff=256)

    def loss(params, x):
        h = md.relu(md.einsum(x, params[0], over="embed"))
        return md.mean(md.square(md.einsum(h, params[1], over="d_ff")))

    def reference(params, x):
        h = jax.nn.relu(x @ params[0])
        return jnp.mean(jnp.square(h @ params[1]))

    ours = flops(
        md.value_and_grad(loss),
        [md.spec([embed, d_ff]), md.spec([d_ff, embed])],
        md.spec([batch, embed]),
    )
    shapes = [(128, 256), (256, 128)]
    arguments = [jax.ShapeDtypeStruct(s, jnp.float32) for s in [*shapes, (rows, 128)]]
    compiled = jax.jit(jax.value_and_grad(reference)).lower(arguments[:2], arguments[2]).compile()
    assert ours == pytest.approx(compiled.cost_analysis()["flops"], rel=0.02)


def test_convolution_and_pooling_count_what_their_windows_meet():
    height, kernel = md.dims(height=12, kernel=3)
    x, f = md.spec([batch, height, embed]), md.spec([kernel, embed, d_ff])

    def conv(x, f):
        return md.conv(x, f, {"height": "kernel"}, "embed", strides=2)

    assert flops(conv, x, f) == 2 * 8 * 6 * 3 * 16 * 64
    assert flops(conv, x, f, mesh="data:4", layout="height:data") == 2 * 8 * 2 * 3 * 16 * 64

    def up(x, f):
        return md.conv_transpose(x, f, {"height": "kernel"}, "embed", strides=2)

    assert flops(up, x, f) == 2 * 8 * (24 * 3 // 2) * 16 * 64
    assert flops(lambda x: md.max_pool(x, {"height": 3}), x) == 8 * 4 * 3 * 16
