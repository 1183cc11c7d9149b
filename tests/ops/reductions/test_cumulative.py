"""Cumulative operations along one dim: values, two derivatives, every layout."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshdsl as md
from tests.ops.agreement import assert_agree, assert_close, message, random, run
from tests.ops.layouts import assert_same_on_every_layout, assert_same_values_on_every_layout

batch, length = md.dims(batch=3, length=7)
X = random([batch, length])
ZEROS = md.named(np.where(np.arange(21).reshape(3, 7) % 4 == 1, 0, X.data), [batch, length])
FLAGS = [(r, e) for r in (False, True) for e in (False, True)]
UFUNCS = {"cumsum": np.add, "cumprod": np.multiply, "cummax": np.maximum, "cummin": np.minimum}
FIRST = {"cumsum": 0.0, "cumprod": 1.0, "cummax": -np.inf, "cummin": np.inf}


def expected(name, x, reverse, exclusive):
    """By numpy's ufuncs, along the last axis."""
    x = x[:, ::-1] if reverse else x
    found = UFUNCS[name].accumulate(x, axis=1)
    if exclusive:
        found = np.concatenate([np.full_like(x[:, :1], FIRST[name]), found[:, :-1]], 1)
    return found[:, ::-1] if reverse else found


def in_jax(name, reverse, exclusive):
    def reference(x):
        found = getattr(jax.lax, name)(x, axis=1, reverse=reverse)
        if exclusive:
            first = jnp.full_like(x[:, :1], FIRST[name])
            parts = [found[:, 1:], first] if reverse else [first, found[:, :-1]]
            found = jnp.concatenate(parts, 1)
        return found

    return reference


@pytest.mark.parametrize(("reverse", "exclusive"), FLAGS)
@pytest.mark.parametrize("name", UFUNCS)
def test_values(name, reverse, exclusive):
    for backend in ("numpy", "jax"):
        found = run(
            lambda x: getattr(md, name)(x, "length", reverse, exclusive), X, backend=backend
        )
        assert_close(found, expected(name, X.data, reverse, exclusive))


@pytest.mark.parametrize(("reverse", "exclusive"), FLAGS)
@pytest.mark.parametrize("name", ["cumsum", "cumprod"])
def test_two_derivatives_also_at_zeros(name, reverse, exclusive):
    for x in (X, ZEROS):
        assert_agree(
            lambda x: getattr(md, name)(x, length, reverse, exclusive),
            in_jax(name, reverse, exclusive),
            x,
            order=2,
        )


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("name", ["cummax", "cummin"])
def test_two_derivatives_of_extremes(name, reverse):
    assert_agree(
        lambda x: getattr(md, name)(x, length, reverse), in_jax(name, reverse, False), X, order=2
    )


def test_the_gradient_of_an_exclusive_extreme():
    """Without the first, which is infinite and has none."""
    x = md.named(np.array([1.0, 3.0, 2.0, 3.5, 0.0]), ["a"])
    weights = md.named(np.array([0.0, 1, 2, 4, 8]), ["a"])

    def model(x):
        found = md.cummax(x, "a", exclusive=True)
        return md.sum(md.where(md.isfinite(found), found, 0) * weights)

    assert_close(run(md.grad(model), x), [1, 6, 0, 8, 0])


def test_of_equal_elements_the_latest_has_the_gradient():
    x = md.named(np.array([1.0, 2.0, 2.0, 1.0]), ["a"])
    assert_close(run(md.grad(lambda x: md.sum(md.cummax(x, "a"))), x), [1, 1, 2, 0])
    assert_close(run(md.grad(lambda x: md.sum(md.cummin(x, "a"))), x), [3, 0, 0, 1])


@pytest.mark.parametrize(("reverse", "exclusive"), FLAGS)
def test_a_linear_recurrence_and_two_derivatives(reverse, exclusive):
    decay = random([batch, length], seed=3)

    def reference(decay, x):
        order = range(7)[::-1] if reverse else range(7)
        state, found = jnp.zeros(3), [None] * 7
        for i in order:
            after = decay[:, i] * state + x[:, i]
            found[i] = state if exclusive else after
            state = after
        return jnp.stack(found, 1)

    assert_agree(
        lambda decay, x: md.linear_recurrence(decay, x, "length", reverse, exclusive),
        reference,
        decay,
        X,
        order=2,
    )


def test_a_decay_may_lack_dims():
    decay = random([length], seed=3)
    found = run(lambda d, x: md.linear_recurrence(d, x, "length"), decay, X)
    state = np.zeros(3)
    for i in range(7):
        state = decay.data[i] * state + X.data[:, i]
        assert_close(np.asarray(found)[:, i], state)


def functions(names):
    return [
        lambda x, n=n, r=r, e=e: getattr(md, n)(x, "length", r, e) for n in names for r, e in FLAGS
    ]


@pytest.mark.long
def test_every_layout_gives_the_same():
    recurrences = [
        lambda x, r=r, e=e: md.linear_recurrence(md.cos(x), x, "length", r, e) for r, e in FLAGS
    ]
    assert_same_on_every_layout([*functions(["cumsum", "cumprod"]), *recurrences], ZEROS)
    extremes = [
        lambda x, n=n, r=r: getattr(md, n)(x, "length", r)
        for n in ("cummax", "cummin")
        for r in (False, True)
    ]
    assert_same_on_every_layout(extremes, X)


@pytest.mark.long
def test_integers_and_nan_on_every_layout():
    data = np.random.default_rng(0).integers(-100, 100, (3, 7))
    holes = X.data.copy()
    holes[0, 2] = holes[1, 0] = holes[2, 6] = np.nan

    def model(whole, narrow, x):
        return [f(each) for f in functions(UFUNCS) for each in (whole, narrow, x)]

    whole, narrow = (md.named(data.astype(t), [batch, length]) for t in ("int32", "int8"))
    x = md.named(holes, [batch, length])
    assert_same_values_on_every_layout(model, whole, narrow, x)
    found = run(lambda a, x: [md.cumsum(a, "length"), md.cummax(x, "length")], narrow, x)
    assert found[0].dtype == np.int8
    assert np.array_equal(found[0], np.cumsum(data, 1, dtype=np.int8))
    assert np.array_equal(found[1], np.maximum.accumulate(holes, 1), equal_nan=True)


@pytest.mark.parametrize("backend", ["numpy", "jax"])
def test_complex_numbers(backend):
    z = md.named(X.data + 1j * X.data[::-1], X.dims)

    def model(z):
        state = md.linear_recurrence(z, z, "length")
        return md.cumsum(z, "length"), md.cumprod(z, "length"), md.prod(z, "length"), state

    total, product, last, state = run(model, z, mesh="x:4", layout="length:x", backend=backend)
    assert np.allclose(total, np.cumsum(z.data, 1), rtol=1e-12)
    assert np.allclose(product, np.cumprod(z.data, 1), rtol=1e-12)
    assert np.allclose(last, np.prod(z.data, 1), rtol=1e-12)
    assert np.allclose(np.asarray(state)[:, 1], z.data[:, 1] * (z.data[:, 0] + 1), rtol=1e-12)


@pytest.mark.parametrize("backend", ["numpy", "jax"])
def test_half_precision_is_accumulated_in_single_precision(backend):
    x = md.named(np.ones(600, md.spec([], "bfloat16").dtype), ["a"])
    found = run(lambda x: md.cumsum(x, "a"), x, backend=backend)
    assert found.dtype == x.dtype
    assert float(np.asarray(found)[-1]) == 600


def test_mistakes_are_told():
    x = random([batch, length])
    for function, text in [
        (lambda x: md.cumsum(x, "lenght"), "cumsum: no dim `lenght` in [batch=3, length=7]. Did"),
        (lambda x: md.cumsum(x > 0, "length"), "needs integer, floating-point or complex"),
        (lambda x: md.cummax(x > 0, "length"), "cummax: needs floating-point or integer tensors"),
        (
            lambda x: md.linear_recurrence(md.cast(x, "float32"), x, "length"),
            "linear_recurrence: decay is float32, but x is float64; cast one of them",
        ),
        (
            lambda x: md.linear_recurrence(x, md.sum(x, "batch"), "length"),
            "`batch`, which x f64[length=7] lacks",
        ),
    ]:
        assert text in message(function, x)
