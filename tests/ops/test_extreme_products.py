"""Products that leave the range of their dtype on the way: on a mesh as finite as on one device."""

import jax.numpy as jnp
import numpy as np
import pytest

import meshdsl as md
from tests.ops.agreement import assert_agree, random, run

pytestmark = [
    pytest.mark.optimized,  # it is about rounding
    pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning"),
]
FLAGS = [(r, e) for r in (False, True) for e in (False, True)]
SPLITS = [("a:2", "l:a"), ("a:3", "l:a"), ("a:2,b:4", "l:a+b")]


def impulse(size, at, value=1.0):
    found = np.zeros(size, np.float32)
    found[at] = value
    return found


def decays(size, value, **others):
    found = np.full(size, value, np.float32)
    for place, other in others.items():
        found[int(place[1:])] = other
    return found


# Decays and inputs of a recurrence that is finite, or is not, from one step to the next.
RECURRENCES = {
    "growth behind zeros": (decays(200, 3), impulse(200, 190)),
    "growth of what is tiny": (decays(200, 2.2, p0=1), impulse(200, 100, 1e-30)),
    "growth that a zero stops": (decays(200, 3, p120=0), impulse(200, 150)),
    "shrinking of what is huge": (decays(200, 0.3), impulse(200, 0, 1e30)),
    "an infinite decay": (decays(200, 3, p50=np.inf), impulse(200, 190)),
    "a NaN": (decays(200, 3), impulse(200, 190) + impulse(200, 3, np.nan)),
}
PRODUCTS = {
    "behind a zero": [0, 1e20, 1e20, 1e20, 1e20, 1e20],
    "behind what is tiny": [1e-30, 1, 1e20, 1e20, 1, 1e20, 1, 1e-10],
    "behind what is huge": [1e30, 1e-20, 1, 1e-20, 1e-20, 1, 1, 1e20],
    "of both signs": [-1e20, 0, -1e30, 1e30, 1, 3],
    "of infinities": [0, 1, np.inf, 1, 2, 3],
    "of NaN": [0, 1, np.nan, 1, 2, 3],
}


def one_by_one(decay, x, exclusive):
    state, found = np.float32(0), []
    with np.errstate(all="ignore"):
        for d, value in zip(decay, x, strict=True):
            after = np.float32(d * state) + value
            found.append(state if exclusive else after)
            state = after
    return np.array(found)


def turned(reverse, *arrays):
    return [array[::-1].copy() if reverse else array for array in arrays]


def assert_near(found, expected):
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-37)


def on_every_split(function, *arrays, backend="numpy"):
    inputs = [md.named(array, ["l"]) for array in arrays]
    for mesh, layout in SPLITS if backend == "numpy" else SPLITS[:1]:
        yield np.asarray(run(function, *inputs, mesh=mesh, layout=layout, backend=backend))


@pytest.mark.parametrize(("reverse", "exclusive"), FLAGS)
@pytest.mark.parametrize("name", RECURRENCES)
def test_a_recurrence_goes_on_as_on_one_device(name, reverse, exclusive):
    decay, x = RECURRENCES[name]
    (expected,) = turned(reverse, one_by_one(decay, x, exclusive))

    def model(d, x):
        return md.linear_recurrence(d, x, "l", reverse, exclusive)

    for found in on_every_split(model, *turned(reverse, decay, x)):
        assert_near(found, expected)


@pytest.mark.parametrize(("reverse", "exclusive"), FLAGS)
@pytest.mark.parametrize("name", PRODUCTS)
def test_products_are_those_of_one_device(name, reverse, exclusive):
    x = np.array(PRODUCTS[name], np.float32)
    expected = np.multiply.accumulate(x)
    if exclusive:
        expected = np.concatenate([np.ones(1, np.float32), expected[:-1]])

    def model(x):
        return md.cumprod(x, "l", reverse, exclusive)

    for found in on_every_split(model, *turned(reverse, x)):
        assert_near(found, *turned(reverse, expected))


@pytest.mark.parametrize("name", PRODUCTS)
def test_a_product_and_its_gradient_are_those_of_one_device(name):
    x = np.array(PRODUCTS[name], np.float32)
    gradient = run(md.grad(lambda x: md.prod(x, "l")), md.named(x, ["l"]))
    for found in on_every_split(lambda x: md.prod(x, "l"), x):
        assert_near(found, np.multiply.accumulate(x)[-1])
    for found in on_every_split(md.grad(lambda x: md.prod(x, "l")), x):
        assert_near(found, gradient)


def test_the_gradient_of_a_recurrence_is_that_of_one_device():
    """Growth from the end, of what has no gradient at all."""
    decay, x = decays(200, 3), impulse(200, 190)

    def loss(d, x):
        found = md.linear_recurrence(d, x, "l")
        return md.sum(md.where(md.arange(md.Dimension("l", 200)) < 5, found, 0))

    for wrt in (0, 1):
        gradient = md.grad(loss, wrt)
        expected = run(gradient, md.named(decay, ["l"]), md.named(x, ["l"]))
        assert np.isfinite(np.asarray(expected)).all()
        for found in on_every_split(gradient, decay, x):
            assert_near(found, expected)


@pytest.mark.long
@pytest.mark.parametrize(("backend", "dtype"), [("jax", "float32"), ("tf", "complex64")])
def test_other_backends_agree(backend, dtype):
    """Those with other algorithms; also where one device alone would lose a long product."""
    long = np.concatenate([np.zeros(300), np.full(300, 3.0)]).astype(dtype)
    decay, x = np.full(400, 3, dtype), impulse(400, 390).astype(dtype)
    product = np.array(PRODUCTS["behind what is tiny"], dtype)

    def model(decay, x, long, product):
        return (
            md.linear_recurrence(decay, x, "l"),
            md.linear_recurrence(decay, md.flip(x, "l"), "l", True, True),
            md.cumprod(long, "m"),
            md.prod(product, "n"),
        )

    named = [md.named(a, [d]) for a, d in zip((decay, x, long, product), "llmn", strict=True)]
    expected = run(model, *named)
    for where in ({}, {"mesh": "a:2", "layout": "l:a; m:a; n:a"}):
        for found, want in zip(run(model, *named, backend=backend, **where), expected, strict=True):
            assert_near(np.abs(np.asarray(found)), np.abs(np.asarray(want)))


def test_integers_wrap_around_as_on_one_device():
    x = np.array([3, 5, -7, 2**20, 2**15, 11], np.int32)
    for found in on_every_split(lambda x: md.cumprod(x, "l"), x):
        np.testing.assert_array_equal(found, np.multiply.accumulate(x, dtype=np.int32))
    for found in on_every_split(lambda x: md.prod(x, "l"), x):
        np.testing.assert_array_equal(found, np.multiply.reduce(x, dtype=np.int32))
    ones = np.ones_like(x)
    for found in on_every_split(lambda x, y: md.linear_recurrence(x, y, "l"), x, ones):
        state, expected = np.int32(0), []
        with np.errstate(all="ignore"):
            for value in x:
                state = np.int32(value * state) + np.int32(1)
                expected.append(state)
        np.testing.assert_array_equal(found, expected)


@pytest.mark.long
@pytest.mark.parametrize("backend", ["numpy", "jax", "tf"])
@pytest.mark.parametrize("split", [None, "l:a", "w:a", "l:a; w:b"])
def test_a_product_over_several_dims_leaves_no_range_on_the_way(backend, split):
    x = np.array([[1e20, 1e20, 2], [1e-20, 3, 1e-20]], np.float32)
    where = {"mesh": "a:2,b:3", "layout": split} if split else {}
    named = md.named(x, ["w", "l"])
    assert_near(run(lambda x: md.prod(x), named, backend=backend, **where), 6)
    slopes = run(md.grad(lambda x: md.prod(x)), named, backend=backend, **where)
    assert_near(slopes, 6 / x)


@pytest.mark.long
def test_a_product_over_several_dims_has_two_derivatives_also_at_zeros():
    x = random(md.dims(a=2, w=3, l=3))
    for zeros in ((), (4,), (4, 6), (1, 8, 15)):
        data = x.data.copy()
        data.reshape(-1)[list(zeros)] = 0
        named = md.named(data, x.dims)
        assert_agree(
            lambda x: md.prod(x, ["w", "l"]), lambda x: jnp.prod(x, (1, 2)), named, order=2
        )


@pytest.mark.parametrize("mesh", [None, "m:2", "m:4"])
@pytest.mark.parametrize("backend", ["numpy", "jax", "tf"])
def test_the_first_decay_counts(backend, mesh):
    """h[-1] is 0, and 0 times an infinity or NaN is NaN, from there on."""
    decay = np.full((3, 4), 0.5, np.float32)
    decay[0, 0], decay[1, 0], decay[2, 2] = np.inf, np.nan, -np.inf
    where = {"mesh": mesh, "layout": "l:m"} if mesh else {}
    d, x = (md.named(v, ["row", "l"]) for v in (decay, np.ones_like(decay)))
    found = np.asarray(
        run(lambda d, x: md.linear_recurrence(d, x, "l"), d, x, backend=backend, **where)
    )
    nan, inf = np.nan, np.inf
    np.testing.assert_array_equal(found, [[nan] * 4, [nan] * 4, [1, 1.5, -inf, -inf]])


@pytest.mark.long
@pytest.mark.parametrize("mesh", [None, "m:2", "m:4"])
@pytest.mark.parametrize("backend", ["numpy", "jax", "tf"])
def test_what_shrinks_from_large_states_is_not_lost(backend, mesh):
    """The product of the decays underflows, the states do not."""
    decay, x = decays(240, 0.3), impulse(240, 0, 1e30)
    where = {"mesh": mesh, "layout": "l:m"} if mesh else {}
    named = [md.named(v, ["l"]) for v in (decay, x)]
    model = lambda d, x: md.linear_recurrence(d, x, "l")  # noqa: E731
    found = np.asarray(run(model, *named, backend=backend, **where))
    assert_near(found[:120], one_by_one(decay, x, False)[:120])


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["complex64", "float64"])
def test_complex_and_double_numbers_leave_their_range_on_no_mesh(dtype):
    big = 1e20 if dtype == "complex64" else 1e200
    x = np.array([big, big, 1 / big, 1 / big, big, big, 1 / big, 2 / big]).astype(dtype)
    if dtype == "complex64":
        x = x * np.exp(1j * np.arange(8)).astype(dtype)
    ones, product = np.ones_like(x), np.prod(x[[0, 2, 1, 3, 4, 6, 5, 7]])

    def model(x, ones):
        return md.cumprod(x, "l"), md.prod(x, "l"), md.linear_recurrence(0.5 * ones, x, "l")

    for backend in ("numpy", "jax", "tf"):
        for mesh in (None, "m:2", "m:4"):
            where = {"mesh": mesh, "layout": "l:m"} if mesh else {}
            named = [md.named(v, ["l"]) for v in (x, ones)]
            every, total, states = run(model, *named, backend=backend, **where)
            np.testing.assert_allclose(
                np.asarray(every)[[0, 3, 7]], [x[0], np.prod(x[[0, 2, 1, 3]]), product], rtol=1e-5
            )
            np.testing.assert_allclose(np.asarray(total), product, rtol=1e-5)
            assert np.isfinite(np.asarray(states)).all()
