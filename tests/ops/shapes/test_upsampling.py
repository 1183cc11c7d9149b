"""Upsampling against JAX's resizing, with its gradient; on every layout."""

import jax
import numpy as np
import pytest

import meshdsl as md
from tests.ops.agreement import assert_agree, message, random, run
from tests.ops.layouts import assert_same_on_every_layout

batch, height, width = md.dims(batch=2, height=5, width=4)


@pytest.mark.parametrize("method", ["nearest", "linear"])
@pytest.mark.parametrize("factors", [(2, 3), (1, 4), (5, 2)])
def test_resizing_by_whole_factors(method, factors):
    whole = (2, 5 * factors[0], 4 * factors[1])
    assert_agree(
        lambda x: md.upsample(x, {"height": factors[0], width: factors[1]}, method),
        lambda x: jax.image.resize(x, whole, method),
        random([batch, height, width]),
    )


def test_a_dim_of_one_element_is_repeated():
    one = md.Dimension("height", 1)
    for method in ("nearest", "linear"):
        found = run(lambda x: md.upsample(x, {"height": 3}, method), random([one]))  # noqa: B023
        assert np.array_equal(found, np.repeat(random([one]).data, 3))


def test_integers_are_repeated_too():
    x = md.named(np.array([3, 1, 4, 1, 5], np.int32), [height])
    for backend in ("numpy", "jax"):
        found = run(lambda x: md.upsample(x, {"height": 2}), x, backend=backend)
        assert np.array_equal(found, np.repeat(x.data, 2))


def test_upsampling_on_every_layout():
    length = md.Dimension("length", 11)
    assert_same_on_every_layout(
        [
            lambda x: md.upsample(x, {"length": 2}),
            lambda x: md.upsample(x, {"length": 3}, "linear"),
        ],
        random([batch, length]),
    )


def test_mistakes_are_told():
    x = random([batch, height])
    for function, text in [
        (lambda x: md.upsample(x, {"hight": 2}), "upsample: no dim `hight` in [batch=2, height=5]"),
        (lambda x: md.upsample(x, {"height": 0}), "the factor for `height` must be a positive"),
        (lambda x: md.upsample(x, {"height": 1.5}), "must be a positive integer, got 1.5"),
        (lambda x: md.upsample(x, {"height": 2}, "cubic"), '"nearest" or "linear", not \'cubic\''),
        (
            lambda x: md.upsample(md.cast(x, "int32"), {"height": 2}, "linear"),
            "needs a floating-point tensor, got s32",
        ),
    ]:
        assert text in message(function, x)
