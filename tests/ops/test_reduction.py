"""Reductions and what is made of them, against JAX in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshdsl as md
from tests.ops.agreement import assert_agree, assert_close, message, random, run

a, b, c = md.dims(a=4, b=3, c=2)
OVER = [("a",), ("b",), ("c", "a"), ("a", "b", "c")]


def axes(over):
    return tuple("abc".index(name) for name in over)


@pytest.mark.parametrize("over", OVER)
@pytest.mark.parametrize("name", ["sum", "mean", "max", "min"])
def test_reductions_with_two_derivatives(name, over):
    assert_agree(
        lambda x: getattr(md, name)(x, over),
        lambda x: getattr(jnp, name)(x, axes(over)),
        random([a, b, c]),
        order=2,
    )


@pytest.mark.parametrize("over", OVER)
@pytest.mark.parametrize("name", ["logsumexp", "softmax", "log_softmax"])
def test_softmax_and_its_kin_with_two_derivatives(name, over):
    reference = {
        "logsumexp": jax.scipy.special.logsumexp,
        "softmax": jax.nn.softmax,
        "log_softmax": jax.nn.log_softmax,
    }[name]
    assert_agree(
        lambda x: getattr(md, name)(x, over),
        lambda x: reference(x, axis=axes(over)),
        random([a, b, c], -3, 3),
        order=2,
    )


def test_without_dims_everything_is_reduced_and_dims_may_be_dimensions():
    x = random([a, b])
    found = run(lambda x: [md.sum(x), x.mean(), x.max(a), x.min([b, "a"]), md.sum(x, [])], x)
    expected = [x.data.sum(), x.data.mean(), x.data.max(0), x.data.min(), x.data]
    for mine, want in zip(found, expected, strict=True):
        assert_close(mine, want)


def test_large_magnitudes_do_not_overflow():
    x = md.named(np.array([1e4, 1e4 - 1, -1e4]), [b])
    assert_close(run(lambda x: md.logsumexp(x, "b"), x), 1e4 + np.log1p(np.exp(-1)))
    assert_close(run(lambda x: md.softmax(x, "b"), x), jax.nn.softmax(x.data))
    nothing = md.named(np.full(3, -np.inf), [b])
    assert run(lambda x: md.logsumexp(x, "b"), nothing).data == -np.inf


def test_ties_of_max_and_min_share_the_gradient():
    x = md.named(np.array([1.0, 3.0, 3.0, 1.0]), [a])
    assert_close(run(md.grad(md.max), x), [0, 0.5, 0.5, 0])
    assert_close(run(md.grad(md.min), x), [0.5, 0, 0, 0.5])
    infinite = md.named(np.array([1.0, np.inf, np.inf, -np.inf]), [a])
    assert_close(run(md.grad(md.max), infinite), [0, 0.5, 0.5, 0])
    assert_close(run(md.grad(md.min), infinite), [0, 0, 0, 1])


def test_an_extreme_that_is_missed_by_rounding_still_has_its_gradient():
    """A compiler may fuse the element's computation into its readers and round it twice."""
    x = md.named(np.array([1.0, 0.5]), [c])
    graph = md.jit(md.grad(md.max)).trace(x)
    assert "equal(" in str(graph)
    assert "greater_equal(" in str(graph)
    close = md.named(np.array([1.0, 1.0 - 2.0**-52]), [c])
    assert_close(run(md.grad(md.max), close), [0.5, 0.5])
    assert_close(run(md.grad(md.max), md.named(np.array([1.0, 1.0 - 1e-12]), [c])), [1, 0])


@pytest.mark.parametrize("dtype", ["int8", "int32", "uint32"])
def test_integers_keep_their_dtype_and_wrap(dtype):
    x = md.named(np.array([100, 27, 3, 5]).astype(dtype), [a])
    for backend in ("numpy", "jax"):
        total, largest = run(lambda x: [md.sum(x), md.max(x)], x, backend=backend)
        assert total.dtype == largest.dtype == dtype
        assert int(total) == x.data.sum(dtype=dtype)
        assert int(largest) == 100


def test_half_precision_is_summed_in_single_precision():
    size = md.Dimension("a", 4096)
    x = md.named(np.ones(4096, md.spec([a], "bfloat16").dtype), [size])
    for backend in ("numpy", "jax"):
        assert float(run(md.sum, x, backend=backend)) == 4096


def test_mistakes_are_told():
    x = random([a, b])
    assert "sum: no dim `aa` in [a=4, b=3]. Did you mean `a`?" in message(
        lambda x: md.sum(x, "aa"), x
    )
    assert "max: dim `a` has size 4 in [a=4, b=3], not 8" in message(
        lambda x: md.max(x, md.Dimension("a", 8)), x
    )
    assert "sum: needs numbers, got bool; cast first" in message(lambda x: md.sum(x > 0), x)
    for name in ("mean", "softmax", "logsumexp", "log_softmax"):
        text = message(lambda x: getattr(md, name)(md.cast(x, "int32"), "a"), x)  # noqa: B023
        assert "needs a floating-point tensor, got s32" in text
