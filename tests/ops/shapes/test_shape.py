"""Rename, split, merge, broadcast, transpose: values, gradients, and mistakes."""

import jax.numpy as jnp
import numpy as np

import meshdsl as md
from tests.ops.agreement import assert_agree, message, random, run

a, b, c = md.dims(a=6, b=4, c=2)


def test_rename():
    assert_agree(lambda x: x.rename(a="z"), lambda x: x, random([a, b]), order=2)
    assert run(lambda x: md.rename(x, {"a": "z"}, b="y"), random([a, b])).dims.names == ("z", "y")


def test_names_can_be_swapped():
    d = md.Dimension("d", 6)
    x = random([a, d])
    found = run(lambda x: x + x.rename(a="d", d="a"), x)
    assert np.array_equal(found, x.data + x.data.T)
    assert_agree(lambda x: x * x.rename(a="d", d="a"), lambda x: x * x.T, x, order=2)


def test_split_is_major_first():
    parts = md.dims(p=3, q=2)
    x = random([b, a, c])
    assert_agree(
        lambda x: x.split("a", parts), lambda x: x.reshape(4, 3, 2, 2), random([b, a, c]), order=2
    )
    assert run(lambda x: md.split(x, a, parts), x).dims.names == ("b", "p", "q", "c")
    again = run(lambda x: md.split(x, "a", [md.Dimension("a", 3), md.Dimension("r", 2)]), x)
    assert again.dims == md.Shape(md.dims(b=4, a=3, r=2, c=2))


def test_merge_puts_the_whole_where_its_major_part_stood():
    x = random([a, b, c])
    assert_agree(
        lambda x: x.merge(["b", "c"], "z"), lambda x: x.reshape(6, 8), random([a, b, c]), order=2
    )

    def apart(x):
        return jnp.transpose(x, (1, 2, 0)).reshape(4, 12)

    assert_agree(lambda x: md.merge(x, [c, a], "z"), apart, x, order=2)
    assert run(lambda x: x.merge(["c", "b"], "b"), x).dims == md.Shape(md.dims(a=6, b=8))
    assert run(lambda x: x.merge("b", "z"), x).dims.names == ("a", "z", "c")


def test_broadcast_puts_dims_anywhere():
    def expected(x):
        return jnp.broadcast_to(x.T[None, :, None, :], (2, 4, 3, 6))

    x = random([a, b])
    assert_agree(lambda x: md.broadcast(x, [c, b, md.Dimension("d", 3), "a"]), expected, x, order=2)


def test_transpose_changes_storage_only():
    x = random([a, b, c])
    assert_agree(lambda x: x.transpose(["c", a, "b"]), lambda x: x.transpose(2, 0, 1), x, order=2)
    assert np.array_equal(
        run(lambda x: x.transpose(["c", "b", "a"]) - x, x).data, np.zeros((2, 4, 6))
    )


def test_mistakes_are_told():
    x = random([a, b])
    for function, text in [
        (lambda x: x.rename(aa="z"), "rename: no dim `aa` in [a=6, b=4]. Did you mean `a`?"),
        (lambda x: x.rename(a="b"), "two dims of one name: `b` occurs twice in [b=6, b=4]"),
        (
            lambda x: x.split("a", md.dims(p=4, q=2)),
            "[p=4, q=2] has 8 elements, but the dim is a=6",
        ),
        (lambda x: x.split("a", ["p", "q"]), "split: 'p', 'q' has no size here"),
        (lambda x: x.split("a", md.dims(b=3, q=2)), "two dims of one name: `b` occurs twice"),
        (lambda x: x.merge([], "z"), "merge: give at least one dim to merge"),
        (lambda x: x.merge(["a"], "b"), "two dims of one name: `b` occurs twice"),
        (lambda x: x.merge(["a", "z"], "y"), "merge: no dim `z` in [a=6, b=4]"),
        (lambda x: x.broadcast([a, c]), "dim `b` of the tensor is missing in [a=6, c=2]"),
        (lambda x: x.broadcast([a, md.Dimension("b", 8)]), "dim `b` has size 8"),
        (lambda x: x.transpose(["a"]), "every dim must be listed; [b=4] is missing"),
    ]:
        assert text in message(function, x)
