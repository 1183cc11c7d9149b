"""Checkpoint changes what is kept for the backward pass, and no number."""

import jax.numpy as jnp
import numpy as np

import meshdsl as md
from tests.ops.agreement import assert_agree, assert_close, random, run

a, b = md.dims(a=4, b=3)


def layer(x, w):
    return md.tanh(md.einsum(md.sin(x), w, over="a"))


def reference(x, w):
    return jnp.tanh(jnp.sin(x) @ w)


def test_values_and_two_derivatives():
    assert_agree(md.checkpoint(layer), reference, random([a]), random([a, b]), order=2)


def test_captured_tensors_have_their_gradients():
    def ours(x, w):
        return md.checkpoint(lambda x: layer(x, w) * md.sum(w))(x)

    assert_agree(ours, lambda x, w: reference(x, w) * w.sum(), random([a]), random([a, b]), order=2)


def test_trees_integers_and_literals_go_through():
    indices = md.named(np.array([1, 1, 0], np.int32), [b])
    table = random([a], seed=5)

    def ours(x, indices):
        def body(tree):
            return {"y": md.take(tree["x"], tree["i"], "a") * md.take(table, tree["i"], "a")}

        return md.checkpoint(body)({"x": x, "i": indices})["y"]

    def theirs(x, indices):
        return x[np.asarray(indices)] * table.data[np.asarray(indices)]

    assert_agree(ours, theirs, random([a]), indices, order=2)


def test_checkpoints_nest():
    def ours(x, w):
        return md.checkpoint(lambda x, w: md.checkpoint(layer)(x, w) ** 2 * md.sum(x))(x, w)

    def theirs(x, w):
        return reference(x, w) ** 2 * x.sum()

    assert_agree(ours, theirs, random([a]), random([a, b]), order=2)


def test_an_output_that_is_an_input():
    assert_agree(
        lambda x: md.checkpoint(lambda x: [x, md.exp(x)])(x)[0] * x, lambda x: x * x, random([a])
    )


def test_the_backward_pass_computes_the_intermediate_values_again():
    def loss(layer):
        return lambda x, w: md.sum(layer(x, w))

    def count(function, name):
        program = md.jit(md.grad(function), backend="numpy").lower(random([a]), random([a, b]))
        return [i.op for i in program.block.instructions].count(name)

    assert count(loss(layer), "tanh") == 1
    assert (
        count(loss(md.checkpoint(layer)), "tanh") == 1
    )  # the forward one, no result of which is kept
    assert count(loss(md.checkpoint(layer)), "barrier") == 1

    def both(x, w):
        y = md.checkpoint(layer)(x, w)
        return md.sum(md.square(y))

    assert count(lambda x, w: md.sum(md.square(layer(x, w))), "tanh") == 1
    assert count(both, "tanh") == 2


def test_layouts_change_nothing():
    def model(x, w):
        return md.value_and_grad(
            lambda x, w: md.sum(md.square(md.checkpoint(layer)(x, w))), (0, 1)
        )(x, w)

    x, w = random([a]), random([a, md.Dimension("b", 4)])
    (value, gradients) = run(model, x, w)
    for backend in ("numpy", "jax"):
        for layout in ("a:x", "a:x; b:y", "b:y+x"):
            again, found = run(model, x, w, mesh="x:2,y:2", layout=layout, backend=backend)
            assert_close(again, value)
            for mine, want in zip(found, gradients, strict=True):
                assert_close(mine, want)
