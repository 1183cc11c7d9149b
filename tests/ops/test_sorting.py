"""Order along one dim: sort, argsort, top_k, nth_largest, against numpy."""

import jax.numpy as jnp
import numpy as np
import pytest

import meshdsl as md
from tests.ops.agreement import assert_agree, assert_close, message, random, run
from tests.ops.layouts import assert_same_on_every_layout, assert_same_values_on_every_layout

batch, length = md.dims(batch=3, length=7)
X = random([batch, length])
INF, NAN = np.inf, np.nan
ODD = np.array(
    [
        [1.0, NAN, -INF, 1.0, -0.0, 0.0, INF],
        [-INF, -INF, -INF, -INF, -INF, -INF, -INF],
        [NAN, 2.0, 2.0, 2.0, -NAN, -1.0, INF],
    ]
)
TIES = np.array([[3, 1, 3, 0, 1, 3, 3], [0] * 7, [6, 5, 4, 3, 2, 1, 0]])


def descending(data):
    """Returns the stable descending order, NaN being the largest: negated, but NaN comes first."""
    key = np.where(np.isnan(data), -INF, -data.astype(float))
    tie = np.where(np.isnan(data), 0, 1)
    return np.lexsort((np.broadcast_to(np.arange(7), data.shape), tie, key), axis=1)


def every(x):
    values, indices = md.top_k(x, 3, "length", "choice")
    return [
        md.sort(x, "length"),
        md.argsort(x, "length"),
        md.sort(x, "length", descending=True),
        md.argsort(x, "length", descending=True),
        values,
        indices,
        md.nth_largest(x, 2, "length"),
    ]


def expected(data):
    up, down = np.argsort(data, 1, kind="stable"), descending(data)
    by = lambda order: np.take_along_axis(data, order, 1)  # noqa: E731
    return [by(up), up, by(down), down, by(down)[:, :3], down[:, :3], by(down)[:, 2]]


@pytest.mark.parametrize("backend", ["numpy", "jax"])
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "int8", "uint32", "bool"])
def test_the_order_is_that_of_numpy(dtype, backend):
    dtype = md.spec([], dtype).dtype
    data = (ODD if dtype.kind in "fV" else TIES).astype(dtype)
    found = run(every, md.named(data, [batch, length]), backend=backend)
    plain = data if dtype.kind in "iub" else data.astype(np.float64)
    for mine, want in zip(found, expected(plain), strict=True):
        mine = np.asarray(mine)
        assert mine.dtype in (dtype, np.int32)
        assert np.array_equal(mine.astype(want.dtype), want, equal_nan=dtype.kind != "b")


def test_every_layout_gives_the_same_order():
    tied = md.named(TIES.astype(np.int32), [batch, length])
    odd = md.named(ODD, [batch, length])
    assert_same_values_on_every_layout(lambda x, y: every(x) + every(y), odd, tied)


@pytest.mark.parametrize("k", [1, 2, 5, 7])
def test_top_k_of_any_size_on_every_layout(k):
    assert_same_values_on_every_layout(
        lambda x: md.top_k(x, k, "length", "choice"),
        md.named(ODD, [batch, length]),
        on_jax=("x:2,y:3", "length:x+y; choice:y?"),
    )


@pytest.mark.long
def test_derivatives():
    x = md.named(np.random.default_rng(0).permutation(21).reshape(3, 7) / 7, [batch, length])
    assert_agree(lambda x: md.sort(x, "length"), lambda x: jnp.sort(x, 1), x, order=2)
    assert_agree(
        lambda x: md.sort(x, length, descending=True), lambda x: -jnp.sort(-x, 1), x, order=2
    )
    assert_agree(
        lambda x: md.top_k(x, 4, "length", "choice")[0], lambda x: -jnp.sort(-x, 1)[:, :4], x
    )
    assert_agree(lambda x: md.nth_largest(x, 6, "length"), lambda x: x.min(1), x)
    assert_same_on_every_layout(
        [
            lambda x: md.sort(x, "length"),
            lambda x: md.top_k(x, 4, "length", "choice")[0],
            lambda x: md.nth_largest(x, 3, "length"),
            lambda x: md.take_along(x, md.argsort(x, "length"), "length"),
        ],
        x,
    )


def test_the_dim_of_the_largest_may_keep_its_name():
    values, _ = run(lambda x: md.top_k(x, 2, "length", "length"), X)
    assert values.dims.names == ("batch", "length")
    assert_close(values, -np.sort(-X.data)[:, :2])


def test_sorting_along_the_first_dim():
    assert_close(run(lambda x: md.sort(x, "batch"), X), np.sort(X.data, 0))
    found, _ = run(lambda x: md.top_k(x, 2, "batch", "choice"), X)
    assert found.dims.names == ("choice", "length")


def test_mistakes_are_told():
    for function, text in [
        (lambda x: md.sort(x, "len"), "sort: no dim `len` in [batch=3, length=7]"),
        (
            lambda x: md.top_k(x, 8, "length", "k"),
            "k must be from 1 to 7, the size of dim `length`",
        ),
        (lambda x: md.top_k(x, 0, "length", "k"), "top_k: k must be from 1 to 7"),
        (lambda x: md.top_k(x, 2, "length", md.Dimension("k", 3)), "k=3 cannot name the 2 largest"),
        (lambda x: md.top_k(x, 2, "length", "batch"), "`batch` occurs twice"),
        (lambda x: md.nth_largest(x, 7, "length"), "n must be from 0 to 6 along length=7, not 7"),
    ]:
        assert text in message(function, X)
