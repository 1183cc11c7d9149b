"""Concat, stack, unstack, split_into, repeat and tile: values, gradients, mistakes."""

import jax.numpy as jnp
import numpy as np
import pytest

import meshdsl as md
from tests.ops.agreement import assert_agree, assert_close, message, random, run
from tests.ops.layouts import assert_same_on_every_layout

batch, length = md.dims(batch=3, length=7)
X = random([batch, length])
SHORT = random([batch, md.Dimension("length", 3)], seed=1)
SAME = random([length, batch], seed=2)

# Of x and a shorter tensor.
CASES = {
    "concat": (lambda x, u: md.concat([x, u], "length"), lambda x, u: jnp.concatenate([x, u], 1)),
    "concat, shorter first": (
        lambda x, u: md.concat([u, x, u], "length"),
        lambda x, u: jnp.concatenate([u, x, u], 1),
    ),
    "concat of slices": (
        lambda x, u: md.concat([x["length", 5:], x["length", :1], u], "length"),
        lambda x, u: jnp.concatenate([x[:, 5:], x[:, :1], u], 1),
    ),
    "concat beside": (
        lambda x, u: md.concat([u, u], "batch"),
        lambda x, u: jnp.concatenate([u, u]),
    ),
    "stack": (
        lambda x, u: md.stack([x, 2 * x, x * x], "pair"),
        lambda x, u: jnp.stack([x, 2 * x, x * x]),
    ),
    "stack into a split dim": (
        lambda x, u: md.stack([md.sum(x, "length") * i for i in range(9)], "length"),
        lambda x, u: jnp.stack([x.sum(1) * i for i in range(9)]),
    ),
    "stack of one": (lambda x, u: md.stack([x], "pair"), lambda x, u: x[None]),
    "unstack": (
        lambda x, u: md.stack(md.unstack(u, "length")[::-1], "pair"),
        lambda x, u: u.T[::-1],
    ),
    "split_into": (
        lambda x, u: md.split_into(x, "length", [2, 4, 1])[1],
        lambda x, u: x[:, 2:6],
    ),
    "split_into equal parts": (
        lambda x, u: md.split_into(md.concat([x, x], "length"), "length", 2)[1] * x,
        lambda x, u: x * x,
    ),
    "repeat": (lambda x, u: md.repeat(x, "length", 3), lambda x, u: jnp.repeat(x, 3, 1)),
    "repeat beside": (lambda x, u: md.repeat(x, "batch", 2), lambda x, u: jnp.repeat(x, 2, 0)),
    "tile": (lambda x, u: md.tile(x, "length", 3), lambda x, u: jnp.tile(x, (1, 3))),
    "tile often": (lambda x, u: md.tile(u, "length", 10), lambda x, u: jnp.tile(u, (1, 10))),
    "tile once": (lambda x, u: md.tile(x, "length", 1) * 1.0, lambda x, u: x),
}


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_values_and_two_derivatives(name):
    function, reference = CASES[name]
    wrap = lambda x, u: reference(jnp.asarray(x), jnp.asarray(u))  # noqa: E731
    assert_agree(function, wrap, X, SHORT, order=2)


def test_every_layout_gives_the_same():
    assert_same_on_every_layout([f for f, _ in CASES.values()], X, SHORT)


def test_the_dims_are_in_the_order_of_the_first_tensor():
    found = run(lambda x, y: md.concat([x, y], "length"), X, SAME)
    assert found.dims == md.Shape(md.dims(batch=3, length=14))
    assert_close(found, np.concatenate([X.data, SAME.data.T], 1))
    found = run(lambda x, y: md.stack([x, y], "pair"), X, SAME)
    assert found.dims == md.Shape(md.dims(pair=2, batch=3, length=7))
    assert_close(found, np.stack([X.data, SAME.data.T]))


def test_unstack_and_split_into_take_apart_what_was_put_together():
    def model(x, u):
        one, two = md.unstack(md.stack([x, x * x], md.Dimension("pair", 2)), "pair")
        three, four = md.split_into(md.concat([x, u], "length"), "length", [7, 3])
        return one, two, three, four

    for layout in ("", "length:x", "pair:x; batch:y"):
        found = run(model, X, SHORT, mesh="x:2,y:2", layout=layout)
        for mine, other in zip(found, [X.data, X.data**2, X.data, SHORT.data], strict=True):
            assert_close(mine, other)


def test_arrays_are_operands_too():
    found = run(lambda x: md.concat([SHORT, x], "length"), X)
    assert_close(found, np.concatenate([SHORT.data, X.data], 1))


@pytest.mark.parametrize("dtype", ["bool", "int8", "bfloat16", "complex64"])
def test_every_dtype_is_put_together(dtype):
    data = np.array([1, 0, 3], np.int32).astype(md.spec([], dtype).dtype)
    x = md.named(data, ["a"])

    def model(x):
        return md.concat([x, x], "a"), md.stack([x, x], "b"), md.tile(x, "a", 9), x["a", 1]

    for layout in ("", "a:x", "b:x"):
        joined, stacked, tiled, one = run(model, x, mesh="x:4", layout=layout)
        assert joined.dtype == data.dtype
        assert np.array_equal(np.asarray(joined), np.concatenate([data, data]))
        assert np.array_equal(np.asarray(stacked), np.stack([data, data]))
        assert np.array_equal(np.asarray(tiled), np.tile(data, 9))
        assert np.asarray(one) == data[1]


def test_a_thousand_tensors_are_joined():
    parts = random([md.Dimension("a", 1000)])
    found = run(
        lambda x: md.concat(md.split_into(x, "a", [1] * 1000)[::-1], "a"),
        parts,
        mesh="x:4",
        layout="a:x",
    )
    assert_close(found, parts.data[::-1])


def test_mistakes_are_told():
    for function, text in [
        (lambda x, u: md.concat([], "length"), "concat: give at least one tensor"),
        (lambda x, u: md.concat([x, u], "width"), "concat: no dim `width` in [batch=3, length=7]"),
        (
            lambda x, u: md.concat([x, u], "batch"),
            "concat: tensor 2 has the dims [length=3] where tensor 1 has [length=7]",
        ),
        (
            lambda x, u: md.concat([x, u], length),
            "concat: dim `length` has size 10 in [batch=3, length=10], not 7",
        ),
        (
            lambda x, u: md.concat([x, md.cast(u, "float32")], "length"),
            "concat: tensor 1 is f64, but tensor 2 is f32; cast one of them",
        ),
        (lambda x, u: md.concat([x, "u"], "length"), "concat: str is not an operand"),
        (
            lambda x, u: md.stack([x, u], "pair"),
            "stack: tensor 2 has the dims [batch=3, length=3] where tensor 1 has [batch=3, length",
        ),
        (lambda x, u: md.stack([x, x], "batch"), "stack: the tensors have a dim `batch` already"),
        (lambda x, u: md.stack([x, x], md.Dimension("p", 3)), "stack: 2 tensors do not make p=3"),
        (lambda x, u: md.unstack(x, "width"), "unstack: no dim `width` in [batch=3, length=7]"),
        (
            lambda x, u: md.split_into(x, "length", [3, 3]),
            "split_into: parts of [3, 3] do not make up length=7",
        ),
        (
            lambda x, u: md.split_into(x, "length", [0, 7]),
            "split_into: parts of [0, 7] do not make up length=7",
        ),
        (lambda x, u: md.split_into(x, "length", 2), "split_into: length=7 has no 2 equal parts"),
        (lambda x, u: md.repeat(x, "length", 0), "repeat: `times` must be 1 or more, got 0"),
        (lambda x, u: md.tile(x, "width", 2), "tile: no dim `width` in [batch=3, length=7]"),
    ]:
        assert text in message(function, X, SHORT), message(function, X, SHORT)


def test_the_gradient_of_a_loop_makes_a_split_again_for_its_second_part():
    steps, n = md.dims(steps=3, n=4)
    data = np.arange(12, dtype="float32").reshape(3, 4)

    def loss(x):
        def add(total, row):
            first, second = md.split_into(md.cast(row, "float32"), "n", 2)
            return total + md.sum(first) + md.sum(second * second), None

        return md.scan(add, md.zeros([]), x, dim="steps")[0]

    x = md.cast(md.named(data, [steps, n]), "bfloat16")
    gradient = md.jit(md.grad(loss), backend="numpy")(x)
    want = np.concatenate([np.ones((3, 2)), 2 * data[:, 2:]], axis=1)
    np.testing.assert_array_equal(np.asarray(gradient).astype("float64"), want)
