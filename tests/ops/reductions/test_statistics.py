"""Statistics over named dims, against numpy and JAX."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

import meshdsl as md
from tests.ops.agreement import assert_agree, assert_close, message, random, run

a, b, c = md.dims(a=4, b=3, c=2)
X = random([a, b, c])
OVER = [("a",), ("b",), ("c", "a"), ("a", "b", "c")]


def axes(over):
    return tuple("abc".index(name) for name in over)


@pytest.mark.long
@pytest.mark.parametrize("over", OVER)
@pytest.mark.parametrize("correction", [0, 1])
def test_variance_and_deviation_with_two_derivatives(over, correction):
    for name in ("var", "std"):
        assert_agree(
            lambda x: getattr(md, name)(x, over, correction),  # noqa: B023
            lambda x: getattr(jnp, name)(x, axes(over), ddof=correction),  # noqa: B023
            X,
            order=2,
        )


@pytest.mark.parametrize("over", OVER)
@pytest.mark.parametrize("order", [1, 2, math.inf])
def test_norms_with_two_derivatives(over, order):
    references = {
        1: lambda x: jnp.abs(x).sum(axes(over)),
        2: lambda x: jnp.sqrt((x * x).sum(axes(over))),
        math.inf: lambda x: jnp.abs(x).max(axes(over)),
    }
    assert_agree(lambda x: md.norm(x, over, order), references[order], X, order=2)


def test_gradients_at_zero_are_zero():
    zero = md.named(np.zeros(3), ["a"])
    for function in (md.std, md.norm, lambda x: md.norm(x, order=1)):
        assert_close(run(md.grad(function), zero), [0, 0, 0])
        assert run(function, zero).data == 0
    assert np.isnan(run(md.norm, md.named(np.array([np.nan]), ["a"])).data)


@pytest.mark.parametrize("name", "abc")
def test_the_median_with_its_derivative(name):
    x = md.named(np.random.default_rng(0).permutation(24).reshape(4, 3, 2) / 7, [a, b, c])
    assert_agree(lambda x: md.median(x, name), lambda x: jnp.median(x, "abc".index(name)), x)


def test_the_median_of_a_nan_is_nan():
    x = md.named(np.array([[1.0, np.nan, 3.0], [5.0, 4.0, 6.0]]), ["a", "b"])
    assert np.array_equal(run(lambda x: md.median(x, "b"), x), [np.nan, 5.0], equal_nan=True)


def test_a_large_mean_does_not_spoil_the_variance():
    x = md.named(1e8 + np.arange(4.0), [a])
    assert_close(run(md.var, x), 1.25)


@pytest.mark.parametrize("backend", ["numpy", "jax"])
def test_half_precision_is_computed_in_single_precision(backend):
    x = md.named(np.ones(4096, md.spec([], "bfloat16").dtype), ["n"])
    found = run(lambda x: [md.norm(x), md.norm(x, order=1), md.std(x)], x, backend=backend)
    assert [float(each) for each in found] == [64, 4096, 0]
    assert all(each.dtype == x.dtype for each in found)


def test_mistakes_are_told():
    for function, text in [
        (lambda x: md.norm(x, order=3), "norm: order must be 1, 2 or math.inf, not 3"),
        (lambda x: md.var(x, "c", correction=2), "var: 2 elements are too few for a correction of"),
        (lambda x: md.var(x > 0), "var: needs a floating-point tensor, got bool"),
        (lambda x: md.std(x > 0), "std: needs a floating-point tensor, got bool"),
        (lambda x: md.norm(x > 0), "norm: needs a floating-point tensor, got bool"),
        (lambda x: md.median(x > 0, "a"), "median: needs a floating-point tensor, got bool"),
    ]:
        assert text in message(function, X)
