"""Pooling against JAX's windows, with its gradients, ties, NaN and padding; on every layout."""

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import meshdsl as md
from tests.ops.agreement import assert_agree, assert_close, message, random, run
from tests.ops.layouts import assert_same_on_every_layout

batch, height, width = md.dims(batch=2, height=7, width=6)
WINDOW = {"height": 3, "width": 2}
CASES = [
    ({}, (3, 2), "VALID", (1, 1)),
    ({"strides": 1, "padding": "same"}, (1, 1), "SAME", (1, 1)),
    ({"strides": {"height": 2}, "padding": {"height": (2, 1)}}, (2, 2), [(2, 1), (0, 0)], (1, 1)),
    ({"strides": 2, "dilation": {"height": 2, "width": 3}}, (2, 2), "VALID", (2, 3)),
]


def image(seed=0):
    return random([batch, height, width], seed=seed)


def reduced(x, start, function, strides, padding, dilation):
    pads = padding if isinstance(padding, str) else [(0, 0), *padding]
    return lax.reduce_window(
        x, start, function, (1, 3, 2), (1, *strides), pads, window_dilation=(1, *dilation)
    )


@pytest.mark.parametrize("case", CASES)
def test_the_maximum_of_each_window(case):
    arguments, strides, padding, dilation = case
    slid = (strides, padding, dilation)
    if dilation == (1, 1):
        assert_agree(
            lambda x: md.max_pool(x, WINDOW, **arguments),
            lambda x: reduced(x, -jnp.inf, lax.max, *slid),
            image(),
        )
    else:  # JAX has no gradient of dilated windows
        found = run(lambda x: md.max_pool(x, WINDOW, **arguments), image())
        assert_close(found, reduced(image().data, -np.inf, lax.max, *slid))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("count_pads", [True, False])
def test_the_mean_of_each_window(case, count_pads):
    arguments, *slid = case

    def theirs(x):
        def sums(x):
            return reduced(x, 0.0, lax.add, *slid)

        return sums(x) / (6 if count_pads else sums(jnp.ones_like(x)))

    assert_agree(
        lambda x: md.avg_pool(x, WINDOW, **arguments, count_pads=count_pads), theirs, image()
    )


@pytest.mark.parametrize("backend", ["numpy", "jax"])
def test_equal_elements_share_the_gradient_of_the_maximum(backend):
    x = md.named(np.array([1.0, 1.0, 0.0, 2.0, 2.0, 2.0, -1.0]), [height])

    def loss(x):
        found = md.max_pool(x, {"height": 3}, strides=2)  # 1, 2, 2
        return md.sum(found * md.named(np.array([6.0, 12.0, 24.0]), [md.Dimension("height", 3)]))

    gradient = run(md.grad(loss), x, backend=backend)
    assert_close(gradient, [3, 3, 0, 6, 6 + 12, 12, 0])


def test_the_gradient_of_the_gradient_is_that_of_what_arrives():
    def loss(x, scale):
        return md.sum(md.max_pool(x, WINDOW, 1, "same") * scale * scale)

    def norm(x, scale):
        return md.sum(md.square(md.grad(loss)(x, scale)))

    x, scale = image(), image(seed=3)
    found = run(md.grad(norm, 1), x, scale)
    step, at = 1e-6, (1, 2, 3)
    ends = []
    for sign in (1, -1):
        moved = scale.data.copy()
        moved[at] += sign * step
        ends.append(float(run(norm, x, md.named(moved, list(scale.dims)))))
    assert np.asarray(found)[at] == pytest.approx((ends[0] - ends[1]) / (2 * step), rel=1e-6)


@pytest.mark.parametrize("backend", ["numpy", "jax"])
def test_nan_wins_and_padding_never_does(backend):
    x = md.named(np.array([-np.inf, -5.0, -3.0, np.nan, -2.0, -4.0, -7.0]), [height])
    found = run(
        lambda x: md.max_pool(x, {"height": 3}, 1, "same"),
        x,
        backend=backend,
        mesh="x:3",
        layout="height:x",
    )
    assert_close(found, [-5, -3, np.nan, np.nan, np.nan, -2, -4])


@pytest.mark.parametrize("backend", ["numpy", "jax"])
def test_integers_and_half_precision(backend):
    numbers = md.named(np.array([3, -5, -9, 7, 1, 2, 2], np.int32), [height])
    found = run(lambda x: md.max_pool(x, {"height": 2}), numbers, backend=backend)
    assert np.array_equal(found, [3, 7, 2])
    many = md.Dimension("height", 1024)
    half = md.named(np.ones(1024, md.spec([], "bfloat16").dtype), [many])
    found = run(lambda x: md.avg_pool(x, {"height": 512}), half, backend=backend)
    assert np.array_equal(np.asarray(found, np.float32), [1, 1])


def test_pooling_on_every_layout():
    length = md.Dimension("length", 11)
    x = random([batch, length])
    assert_same_on_every_layout(
        [
            lambda x: md.max_pool(x, {"length": 3}, strides=2, padding="same"),
            lambda x: md.max_pool(x, {"length": 4}, strides=1, padding=2, dilation=2),
            lambda x: md.avg_pool(x, {"length": 2}),
            lambda x: md.avg_pool(x, {"length": 5}, strides=3, padding=(4, 2)),
        ],
        x,
    )


def test_two_split_dims_with_corners():
    x = image()

    def both(x):
        def loss(x):
            highest = md.max_pool(x, WINDOW, 1, "same")
            return md.sum(md.sin(highest + md.avg_pool(x, WINDOW, 1, "same")))

        return loss(x), md.grad(loss)(x)

    expected = run(both, x)
    for layout in ("height:x; width:y", "height:y+x", "width:x; batch:y"):
        found = run(both, x, mesh="x:3,y:2", layout=layout)
        for mine, other in zip(found, expected, strict=True):
            assert_close(mine, other)


def test_mistakes_are_told():
    x = image()
    for function, text in [
        (
            lambda x: md.max_pool(md.cast(x, "complex64"), {"height": 2}),
            "max_pool: complex numbers have no order, got c64; take a part, as in md.real(x)",
        ),
        (lambda x: md.max_pool(x, {}), "max_pool: `window` names no dim to slide along"),
        (lambda x: md.max_pool(x, {"hight": 2}), "no dim `hight` in [batch=2, height=7, width=6]"),
        (lambda x: md.max_pool(x, {"height": 0}), "dim `height` needs a positive integer size"),
        (lambda x: md.avg_pool(x, {"height": 8}), "height=8 spans 8 positions, more than height=7"),
        (
            lambda x: md.avg_pool(x, {"height": 2}, 1, (0, 3)),
            "the window at position 7 of `height` sees padding only",
        ),
        (
            lambda x: md.avg_pool(x, {"height": 2}, {"width": 2}),
            "strides is given for `width`, but the window slides along `height`",
        ),
        (
            lambda x: md.avg_pool(md.cast(x, "int32"), {"height": 2}),
            "avg_pool: needs a floating-point tensor, got s32",
        ),
        (lambda x: md.max_pool(x > 0, {"height": 2}), "needs numbers, got bool; cast first"),
    ]:
        assert text in message(function, x)
