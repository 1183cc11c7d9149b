"""Reductions and what is made of them, against JAX in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshdsl as md
from tests.ops.agreement import assert_agree, assert_close, message, random, run
from tests.ops.layouts import assert_same_on_every_layout, assert_same_values_on_every_layout

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


@pytest.mark.long
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
    assert {"equal", "greater_equal"} <= {op.name for op in graph.operations}
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


@pytest.mark.long
@pytest.mark.parametrize("over", OVER)
def test_a_product_and_two_derivatives_also_at_zeros(over):
    x = random([a, b, c], 0.5, 1.5)
    one_zero = np.where(np.arange(24).reshape(4, 3, 2) == 7, 0, x.data)
    zeros = np.where(np.arange(24).reshape(4, 3, 2) % 5 == 2, 0, x.data)
    for data in (x.data, one_zero, zeros):
        assert_agree(
            lambda x: md.prod(x, over),
            lambda x: jnp.prod(x, axes(over)),
            md.named(data, [a, b, c]),
            order=2,
        )


@pytest.mark.parametrize("name", ["argmax", "argmin"])
def test_where_the_extreme_is(name):
    odd = np.array([[1.0, 3.0, 3.0], [np.nan, 5.0, np.nan], [-np.inf] * 3, [0.0, -0.0, 0.0]])
    for data in (odd, odd.astype(md.spec([], "bfloat16").dtype), np.sign(odd[[0, 3]]), odd > 2):
        x = md.named(data, ["a", "b"])
        wide = data if data.dtype == bool else data.astype(np.float64)
        for backend in ("numpy", "jax"):
            found = run(lambda x: getattr(md, name)(x, "b"), x, backend=backend)
            assert found.dtype == np.int32
            assert np.array_equal(found, getattr(np, name)(wide, 1))


def test_methods_are_spellings_of_functions():
    x = random([a, b])
    found = run(lambda x: [x.prod(a), x.argmax("b"), x.argmin(a), (x > 0).any(), (x > 0).all(b)], x)
    positive = x.data > 0
    expected = [x.data.prod(0), x.data.argmax(1), x.data.argmin(0), positive.any(), positive.all(1)]
    for mine, want in zip(found, expected, strict=True):
        assert np.allclose(mine, want, rtol=1e-12)


def test_any_and_all():
    x = md.named(np.arange(24).reshape(4, 3, 2) % 5 > 0, [a, b, c])
    for over in OVER:
        found = run(lambda x: (md.any(x, over), md.all(x, over)), x)  # noqa: B023
        assert np.array_equal(found[0], x.data.any(axes(over)))
        assert np.array_equal(found[1], x.data.all(axes(over)))
        assert found[0].dtype == bool


def test_every_layout_gives_the_same():
    rows, length = md.dims(batch=3, length=7)
    x = random([rows, length, c], 0.5, 1.5)
    differentiable = [
        *(
            lambda x, n=n, over=over: getattr(md, n)(x, over)
            for n in ("sum", "mean", "prod", "max", "min", "logsumexp", "softmax")
            for over in ("length", ["batch", "length"])
        ),
        lambda x: md.var(x, "length", correction=1),
        lambda x: md.std(x, ["length", "c"]),
        lambda x: md.median(x, "length"),
        *(lambda x, p=p: md.norm(x - 1, "length", order=p) for p in (1, 2, np.inf)),
    ]
    assert_same_on_every_layout(differentiable, x)


def test_every_layout_finds_the_same_places():
    rows, length = md.dims(batch=3, length=7)
    odd = np.random.default_rng(0).integers(-2, 3, (3, 7)).astype(float)
    odd[0, 5] = odd[0, 6] = np.nan
    odd[1] = -np.inf

    def model(x, i):
        names = ("argmax", "argmin")
        found = [getattr(md, n)(y, d) for n in names for y in (x, i) for d in ("length", "batch")]
        found += [md.any(i > 1, "length"), md.all(i > -2, "length"), md.count_nonzero(i)]
        return [*found, md.prod(i), md.max(x, "length"), md.min(x, "batch")]

    whole = md.named(np.nan_to_num(odd, neginf=-9).astype(np.int32), [rows, length])
    assert_same_values_on_every_layout(model, md.named(odd, [rows, length]), whole)


def test_mistakes_are_told():
    x = random([a, b])
    assert "sum: no dim `aa` in [a=4, b=3]. Did you mean `a`?" in message(
        lambda x: md.sum(x, "aa"), x
    )
    assert "max: dim `a` has size 4 in [a=4, b=3], not 8" in message(
        lambda x: md.max(x, md.Dimension("a", 8)), x
    )
    assert "sum: needs numbers, got bool; cast first" in message(lambda x: md.sum(x > 0), x)
    for name in ("max", "min"):
        text = message(lambda x: getattr(md, name)(md.cast(x, "complex128")), x)  # noqa: B023
        assert f"{name}: needs floating-point or integer tensors, got c128" in text
    assert "any: needs a bool tensor, got f64; compare first, as in x != 0" in message(md.any, x)
    assert "all: needs a bool tensor, got f64" in message(md.all, x)
    assert "argmax: no dim `c` in [a=4, b=3]" in message(lambda x: md.argmax(x, "c"), x)
    assert "prod: needs numbers, got bool" in message(lambda x: md.prod(x > 0, "a"), x)
    for name in ("mean", "softmax", "logsumexp", "log_softmax"):
        text = message(lambda x: getattr(md, name)(md.cast(x, "int32"), "a"), x)  # noqa: B023
        assert "needs a floating-point tensor, got s32" in text
