"""Slice, index, pad, flip, shift, diff and their dynamic forms: values, gradients, mistakes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import meshdsl as md
from tests.ops.agreement import assert_agree, assert_close, message, random, run
from tests.ops.layouts import assert_same_on_every_layout

batch, length = md.dims(batch=3, length=7)
X = random([batch, length])
SHORT = random([batch, md.Dimension("length", 3)], seed=1)


def scalar(value, dtype=np.int32):
    return md.named(np.array(value, dtype), [])


CASES = {
    "slice": (lambda x: md.slice(x, "length", 2, 5), lambda x: x[:, 2:5]),
    "slice from the end": (lambda x: x["length", -3:], lambda x: x[:, -3:]),
    "slice beyond the end": (lambda x: x["length", 4:99], lambda x: x[:, 4:99]),
    "slice with a step": (lambda x: x["length", 1::2], lambda x: x[:, 1::2]),
    "slice with a long step": (lambda x: x["length", 0:7:6], lambda x: x[:, 0:7:6]),
    "slice backwards": (lambda x: md.slice(x, "length", 5, 0, -2), lambda x: x[:, 5:0:-2]),
    "slice of one": (lambda x: x["length", 3:4], lambda x: x[:, 3:4]),
    "index": (lambda x: md.index(x, "length", 4), lambda x: x[:, 4]),
    "index from the end": (lambda x: x["length", -1], lambda x: x[:, -1]),
    "pad": (lambda x: md.pad(x, "length", 2, 1), lambda x: jnp.pad(x, ((0, 0), (2, 1)))),
    "pad far": (lambda x: md.pad(x, "length", 0, 9), lambda x: jnp.pad(x, ((0, 0), (0, 9)))),
    "pad with a number": (
        lambda x: md.pad(x, length, 1, 3, value=2.5),
        lambda x: jnp.pad(x, ((0, 0), (1, 3)), constant_values=2.5),
    ),
    "crop": (lambda x: md.pad(x, "length", -2, -1), lambda x: x[:, 2:-1]),
    "pad and crop": (
        lambda x: md.pad(x, "length", 3, -4),
        lambda x: jnp.pad(x[:, :-4], ((0, 0), (3, 0))),
    ),
    "pad between": (
        lambda x: md.pad(x, "length", 1, 2, interior=2),
        lambda x: jax.lax.pad(x, 0.0, ((0, 0, 0), (1, 2, 2))),
    ),
    "pad between and crop": (
        lambda x: md.pad(x, "length", -2, -3, interior=1, value=-1.0),
        lambda x: jax.lax.pad(x, -1.0, ((0, 0, 0), (-2, -3, 1))),
    ),
    **{
        f"pad in mode {mode}": (
            lambda x, mode=mode: md.pad(x, "length", 4, 3, mode=mode),
            lambda x, mode=mode: jnp.pad(x, ((0, 0), (4, 3)), mode),
        )
        for mode in ("edge", "reflect", "symmetric", "wrap")
    },
    "pad one end in mode wrap": (
        lambda x: md.pad(x, "length", 0, 7, mode="wrap"),
        lambda x: jnp.pad(x, ((0, 0), (0, 7)), "wrap"),
    ),
    "flip": (lambda x: md.flip(x, "length"), lambda x: x[:, ::-1]),
    "flip two": (lambda x: md.flip(x, ["batch", length]), lambda x: x[::-1, ::-1]),
    "shift": (lambda x: md.shift(x, "length", 2), lambda x: jnp.pad(x[:, :-2], ((0, 0), (2, 0)))),
    "shift back": (
        lambda x: md.shift(x, "length", -3),
        lambda x: jnp.pad(x[:, 3:], ((0, 0), (0, 3))),
    ),
    "shift away": (lambda x: md.shift(x, "length", 9), jnp.zeros_like),
    "roll": (lambda x: md.shift(x, "length", 2, wrap=True), lambda x: jnp.roll(x, 2, 1)),
    "roll back": (lambda x: md.shift(x, "length", -10, wrap=True), lambda x: jnp.roll(x, -10, 1)),
    "diff": (lambda x: md.diff(x, "length"), lambda x: jnp.diff(x, axis=1)),
    "dynamic slice at a number": (
        lambda x: md.dynamic_slice(x, "length", 9, 3),
        lambda x: x[:, 4:7],
    ),
}
# Of x, a shorter tensor and a scalar that is 2.
DYNAMIC = {
    "dynamic slice": (
        lambda x, u, at: md.dynamic_slice(x, "length", at, 3),
        lambda x, u: x[:, 2:5],
    ),
    "dynamic slice, limited": (
        lambda x, u, at: md.dynamic_slice(x, "length", at * 9, 3),
        lambda x, u: x[:, 4:7],
    ),
    "dynamic update": (
        lambda x, u, at: md.dynamic_update_slice(x, u, "length", at),
        lambda x, u: x.at[:, 2:5].set(u),
    ),
    "dynamic update, limited": (
        lambda x, u, at: md.dynamic_update_slice(x, u, "length", at - 5),
        lambda x, u: x.at[:, 0:3].set(u),
    ),
    "dynamic update at a number": (
        lambda x, u, at: md.dynamic_update_slice(x, u, "length", 3),
        lambda x, u: x.at[:, 3:6].set(u),
    ),
    "dynamic shift": (
        lambda x, u, at: md.shift(x, "length", at),
        lambda x, u: jnp.pad(x[:, :-2], ((0, 0), (2, 0))),
    ),
    "dynamic roll": (
        lambda x, u, at: md.shift(x, "length", at * -4, wrap=True),
        lambda x, u: jnp.roll(x, -8, 1),
    ),
    "looked up": (lambda x, u, at: x["length", at], lambda x, u: x[:, 2]),
}


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_values_and_two_derivatives(name):
    function, reference = CASES[name]
    assert_agree(function, reference, X, order=2)


@pytest.mark.parametrize("name", DYNAMIC)
def test_values_and_derivatives_at_a_position_that_is_a_tensor(name):
    function, reference = DYNAMIC[name]
    expected = lambda x, u, at: reference(jnp.asarray(x), u)  # noqa: E731
    assert_agree(function, expected, X, SHORT, scalar(2))


@pytest.mark.long
def test_every_layout_gives_the_same():
    functions = [lambda x, u, at, f=f: f(x) for f, _ in CASES.values()]
    functions += [f for f, _ in DYNAMIC.values()]
    assert_same_on_every_layout(functions, X, SHORT, scalar(2))


WINDOWS = st.tuples(
    st.integers(1, 11),  # size of the dim
    st.integers(-8, 14),  # start
    st.integers(1, 13),  # size of the window
    st.sampled_from([-3, -2, -1, 1, 2, 3, 5]),
    st.integers(1, 3),
    st.sampled_from(["x", "y", "x+y", "y+x"]),
)


@given(WINDOWS)
@settings(max_examples=150)
def test_a_window_of_any_kind_and_its_gradient(case):
    """By the definition, element by element; the gradient is the transposed matrix."""
    from meshdsl.ops.shapes.slicing import window

    before, start, size, stride, dilation, axes = case
    matrix = np.zeros((size, before))
    for p in range(size):
        q, between = divmod(start + p * stride, dilation)
        if not between and 0 <= q < before:
            matrix[p, q] = 1
    x, g = random([md.Dimension("a", before)]), random([md.Dimension("a", size)], seed=1)

    def both(x, g):
        def made(x):
            return window(x, "a", start, size, stride, dilation)

        return made(x), md.grad(lambda x: md.sum(made(x) * g))(x)

    found, gradient = run(both, x, g, mesh="x:2,y:3", layout=f"a:{axes}")
    assert_close(found, matrix @ x.data)
    assert_close(gradient, matrix.T @ g.data)


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint32", "bfloat16", "complex64"])
def test_every_dtype_moves_as_it_is(dtype):
    data = np.array([3, 0, 7, 1, 0, 2], np.int32).astype(np.dtype(md.spec([], dtype).dtype))
    x = md.named(data, ["a"])

    def model(x):
        rolled = md.shift(x, "a", 1, wrap=True)
        one = md.named(np.array(1, np.int32), [])
        return [md.flip(x, "a"), rolled, md.pad(x, "a", 1, 0), md.shift(x, "a", one)]

    for layout in ("", "a:x"):
        found = run(model, x, mesh="x:4", layout=layout)
        padded = np.concatenate([np.zeros(1, data.dtype), data])
        expected = [data[::-1], np.roll(data, 1), padded, padded[:-1]]
        for mine, other in zip(found, expected, strict=True):
            assert mine.dtype == data.dtype
            assert np.array_equal(np.asarray(mine), other)


def test_infinities_and_nan_do_not_spread():
    x = md.named(np.array([1.0, np.nan, -np.inf, 4.0, 5.0]), ["a"])
    found = run(lambda x: md.pad(x["a", 3:], "a", 1, 1), x, mesh="x:4", layout="a:x")
    assert np.array_equal(found, [0.0, 4.0, 5.0, 0.0])


def test_starts_with_dims_of_their_own_give_a_slice_each():
    starts = md.named(np.array([0, 3, 9], np.int32), ["row"])
    found = run(lambda x, s: md.dynamic_slice(x, "length", s, 2), X, starts)
    assert found.dims.names == ("row", "batch", "length")
    assert_close(found, np.stack([X.data[:, s : s + 2] for s in (0, 3, 5)]))


def test_an_update_may_lack_dims_and_have_them_in_another_order():
    one = random([md.Dimension("length", 2)])
    found = run(lambda x, u: md.dynamic_update_slice(x, u, "length", 1), X, one)
    expected = X.data.copy()
    expected[:, 1:3] = one.data
    assert_close(found, expected)
    turned = random([md.Dimension("length", 2), batch])
    found = run(lambda x, u: md.dynamic_update_slice(x, u, "length", 5), X, turned)
    expected = X.data.copy()
    expected[:, 5:7] = turned.data.T
    assert_close(found, expected)
    assert found.dims == X.dims


def test_what_changes_nothing_is_nothing():
    def model(x):
        same = [x["length", :], md.pad(x, "length"), md.shift(x, "length", 0)]
        same += [md.shift(x, "length", 14, wrap=True)]
        assert all(y is x for y in same)
        return x

    run(model, X)


def test_mistakes_are_told():
    for function, text in [
        (lambda x: x["length", 5:5], "slice: [5:5:1] holds nothing of length=7, and a dim cannot"),
        (lambda x: md.slice(x, "lenght", 1), "slice: no dim `lenght` in [batch=3, length=7]. Did"),
        (lambda x: md.index(x, "length", 7), "index: position 7 is outside of length=7"),
        (lambda x: x["length", -8], "index: position -8 is outside of length=7"),
        (lambda x: x["length"], 'write x["length", 1:5] or x["length", 0], a dim and what of it'),
        (lambda x: md.pad(x, "length", -4, -3), "pad: taking 4 and 3 away leaves nothing of"),
        (lambda x: md.pad(x, "length", interior=-1), "pad: interior must be 0 or more, got -1"),
        (lambda x: md.pad(x, "length", 1, mode="mirror"), "the mode is one of 'constant', 'edge',"),
        (lambda x: md.pad(x, "length", 1, value=True), "pad: the bool True meets a tensor of numb"),
        (lambda x: md.pad(x, "length", 1, value=x), "pad: the value must be a number, got f64["),
        (
            lambda x: md.pad(x, "length", 7, mode="reflect"),
            "pad: in the mode 'reflect' length=7 can be padded by 0 to 6, not by 7 and 0",
        ),
        (
            lambda x: md.pad(x, "length", -1, mode="edge"),
            "pad: in the mode 'edge' length=7 can be padded by 0 or more, not by -1 and 0",
        ),
        (
            lambda x: md.pad(x, "length", 1, interior=1, mode="wrap"),
            "pad: value and interior belong to the mode 'constant', not to 'wrap'",
        ),
        (
            lambda x: x["length", : md.sum(x)],
            "slice: positions are whole numbers, not f64[]; for tensors: md.dynamic_slice",
        ),
        (lambda x: md.slice(x, "length", 0, 3, 0), "slice: slice step cannot be zero"),
        (
            lambda x: md.index(x, "length", md.arange(batch)),
            "index: positions are whole numbers, not s32[batch=3]; for tensors: md.take",
        ),
        (lambda x: md.flip(x, "width"), "flip: no dim `width` in [batch=3, length=7]"),
        (lambda x: md.shift(x, "length", x), "shift: `by` must be integers, got f64"),
        (
            lambda x: md.shift(x, "length", md.arange(batch)),
            "shift: `by` must be without dims, got [batch=3]",
        ),
        (lambda x: md.diff(x["length", 2:3], "length"), "diff: length=1 has no neighbours"),
        (lambda x: md.diff(x > 0, "length"), "needs floating-point"),
        (
            lambda x: md.dynamic_slice(x, "length", 0, 8),
            "dynamic_slice: a slice of length=7 has 1 to 7 positions, not 8",
        ),
        (lambda x: md.dynamic_slice(x, "length", 0.5, 2), "`start` must be integers, got f32"),
        (
            lambda x: md.dynamic_update_slice(x, md.pad(x, "length", 1), "length", 0),
            "dynamic_update_slice: an update of length=8 does not fit into length=7",
        ),
        (
            lambda x: md.dynamic_update_slice(x, md.cast(x, "float32"), "length", 0),
            "dynamic_update_slice: x is f64, but the update is f32",
        ),
        (
            lambda x: md.dynamic_update_slice(x, x.rename(batch="row"), "length", 0),
            "dynamic_update_slice: no dim `row` in [batch=3, length=7]",
        ),
        (
            lambda x: md.dynamic_update_slice(x, x, "length", md.arange(batch)),
            "dynamic_update_slice: `start` must be without dims, got [batch=3]",
        ),
    ]:
        assert text in message(function, X), message(function, X)
