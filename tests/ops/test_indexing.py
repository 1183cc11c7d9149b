"""Look-ups and their gradients, indices outside of the table included."""

import jax.numpy as jnp
import numpy as np
import pytest

import meshdsl as md
from tests.ops.agreement import assert_agree, assert_close, message, random, run

vocab, embed, batch, length = md.dims(vocab=6, embed=4, batch=3, length=2)
TOKENS = np.array([[0, 5], [3, 3], [2, 0]], np.int32)
STRAY = np.array([[0, 6], [-1, 3], [7, -6]], np.int32)


def tokens(data=TOKENS, dtype=np.int32):
    return md.named(data.astype(dtype), [batch, length])


@pytest.mark.parametrize("dims", [[vocab, embed], [embed, vocab], [vocab]])
def test_take_and_two_derivatives(dims):
    at = dims.index(vocab)

    def expected(table, indices):
        found = jnp.take(table, indices, axis=at)
        return jnp.moveaxis(found, (at, at + 1), (0, 1))

    assert_agree(lambda t, i: md.take(t, i, "vocab"), expected, random(dims), tokens(), order=2)


@pytest.mark.parametrize("backend", ["numpy", "jax"])
@pytest.mark.parametrize("layout", ["", "vocab:x", "vocab:x; batch:y", "embed:x; length:x?"])
def test_an_index_outside_of_the_table_gives_zeros_and_no_gradient(layout, backend):
    table = random([vocab, embed])

    def model(table, indices):
        return md.take(table, indices, vocab), md.grad(
            lambda t: md.sum(md.take(t, indices, vocab) * md.arange(embed, "float64"))
        )(table)

    found, gradient = run(
        model, table, tokens(STRAY), mesh="x:2,y:3", layout=layout, backend=backend
    )
    inside = (STRAY >= 0) & (STRAY < 6)
    expected = np.where(inside[..., None], table.data[np.where(inside, STRAY, 0)], 0)
    assert_close(found, expected)
    counts = np.bincount(STRAY[inside], minlength=6)
    assert_close(gradient, counts[:, None] * np.arange(4.0))


def test_integers_are_looked_up_too():
    table = md.named(np.arange(6, dtype=np.int32) ** 2, [vocab])
    assert np.array_equal(run(lambda t, i: md.take(t, i, "vocab"), table, tokens()), TOKENS**2)


@pytest.mark.parametrize("dtype", ["uint8", "int8", "int32", "uint32", "int64"])
def test_indices_of_every_integer_dtype(dtype):
    table = random([vocab, embed])
    found = run(lambda t, i: md.take(t, i, "vocab"), table, tokens(dtype=dtype))
    assert_close(found, table.data[TOKENS])
    hot = run(lambda i: md.one_hot(i, vocab, "float64"), tokens(dtype=dtype))
    assert_close(hot, np.eye(6)[TOKENS])


def test_one_hot_is_zero_for_an_index_outside():
    found = run(lambda i: md.one_hot(i, vocab), tokens(STRAY))
    assert found.dims.names == ("batch", "length", "vocab")
    assert np.array_equal(found, STRAY[..., None] == np.arange(6))


def test_one_hot_counts_further_than_narrow_indices_reach():
    long = md.Dimension("vocab", 300)
    narrow = md.named(np.array([3, 100, -1], np.int8), [batch])
    found = run(lambda i: md.one_hot(i, long), narrow)
    assert np.array_equal(found, narrow.data[:, None] == np.arange(300))


def test_mistakes_are_told():
    table, indices = random([vocab, embed]), tokens()
    for function, text in [
        (lambda t, i: md.take(t, t, "vocab"), "take: the indices must be integers, got f64"),
        (lambda t, i: md.take(t, i, "vocabs"), "no dim `vocabs` in [vocab=6, embed=4]. Did you"),
        (
            lambda t, i: md.take(t, i.rename(length="embed"), "vocab"),
            "table and indices share the dim `embed`; rename it in one",
        ),
        (lambda t, i: md.one_hot(t, vocab), "one_hot: the indices must be integers, got f64"),
    ]:
        assert text in message(function, table, indices)
