"""Checkpoint changes what is kept for the backward pass, and no number."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshdsl as md
from tests.ops.agreement import arrays_of, assert_agree, assert_close, message, random, run

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


# Named values.


def named_layer(x, w):
    h = md.name(md.einsum(md.sin(x), w, over="a"), "mixed")
    return md.einsum(md.exp(md.tanh(h)), w, over="b")


def reference_layer(x, w):
    return jnp.exp(jnp.tanh(jnp.sin(x) @ w)) @ w.T


def operations(function, *inputs):
    """Returns the operations of a program with its bodies, backward ones marked."""
    program = md.jit(function, backend="numpy").lower(*inputs)
    return [f"{i.op} backward" if i.source.backward else i.op for i, _ in program.block.walk()]


def summed(layer):
    return lambda x, w: md.sum(layer(x, w))


def squared(layer):
    return lambda *inputs: md.sum(md.square(layer(*inputs)))


@pytest.mark.parametrize("keep", [(), "mixed", ["mixed"]])
def test_kept_names_change_no_number(keep):
    layer = md.checkpoint(named_layer, keep=keep)
    assert_agree(layer, reference_layer, random([a]), random([a, b]), order=2)


def test_what_is_named_is_kept_and_the_rest_computed_again():
    x, w = random([a]), random([a, b])
    recomputing = operations(md.grad(squared(md.checkpoint(named_layer)), (0, 1)), x, w)
    keeping = operations(md.grad(squared(md.checkpoint(named_layer, keep=["mixed"])), (0, 1)), x, w)
    assert recomputing.count("einsum") == 3  # both of the forward pass, and the first one again
    assert keeping.count("einsum") == 2
    assert keeping.count("tanh") == recomputing.count("tanh") == 2  # forward, and from what is kept
    assert keeping.count("sin") == 2  # once more, for the gradient of w
    plain = operations(md.grad(squared(named_layer), (0, 1)), x, w)
    assert plain.count("tanh") == plain.count("sin") == 1


def scanned(layer):
    def model(x, stacked):
        return md.scan(lambda x, w: (layer(x, w), None), x, stacked, "layers")[0]

    return model


layers = md.Dimension("layers", 3)


def reference_scanned(x, stacked):
    for w in stacked:
        x = reference_layer(x, w)
    return x


def test_in_a_scan_the_named_values_are_stacked_and_others_are_not():
    stacked = random([layers, a, b], seed=1)
    saved = {}
    for keep in [(), ("mixed",)]:
        layer = md.checkpoint(named_layer, keep=keep)
        assert_agree(scanned(layer), reference_scanned, random([a]), stacked, order=2)
        gradient = md.grad(summed(scanned(layer)), (0, 1))
        program = md.jit(gradient, backend="numpy").lower(random([a]), stacked)
        forward, backward = [i for i in program.block.instructions if i.op == "scan"]
        saved[keep] = [v.shape.names for v in forward.outputs[1:]]
        again = [i.op for i in backward.body.instructions if not i.source.backward]
        assert again.count("einsum") == (0 if keep else 1)
        assert again.count("tanh") == 1
    assert saved[()] == [("layers", "a")]  # the carry
    assert sorted(saved["mixed",]) == [("layers", "a"), ("layers", "b")]


def test_around_a_scan_the_named_values_of_its_body_are_kept_stacked():
    stacked, x = random([layers, a, b], seed=1), random([a])
    whole = md.checkpoint(scanned(named_layer), keep=["mixed"])
    assert_agree(whole, reference_scanned, x, stacked, order=2)
    scans = {}
    for keep in [(), ("mixed",)]:
        whole = md.checkpoint(scanned(named_layer), keep=keep)
        gradient = md.grad(squared(whole), (0, 1))
        program = md.jit(gradient, backend="numpy").lower(x, stacked)
        found = [i for i in program.block.instructions if i.op == "scan"]
        scans[keep] = [[i.op for i in scan.body.instructions].count("einsum") for scan in found]
    assert scans[()][:2] == [2, 2]  # forward, and all of it again
    assert scans["mixed",][:2] == [2, 1]


def test_a_name_in_a_nested_checkpoint_is_kept_by_the_outer_one():
    def ours(x, w):
        return md.checkpoint(lambda x, w: md.checkpoint(named_layer)(x, w) * 2, keep="mixed")(x, w)

    assert_agree(ours, lambda x, w: reference_layer(x, w) * 2, random([a]), random([a, b]), order=2)


def test_a_name_changes_nothing_by_itself():
    x, w = random([a]), random([a, b])
    assert_agree(named_layer, reference_layer, x, w, order=2)
    assert operations(named_layer, x, w) == ["sin", "einsum", "tanh", "exp", "einsum"]


def test_a_branch_s_names_are_computed_again():
    def ours(x, w):
        def body(x, w):
            return md.cond(md.sum(x) > 0, lambda: named_layer(x, w), lambda: x)

        return md.checkpoint(body, keep=["mixed"])(x, w)

    assert_agree(ours, reference_layer, random([a], 0, 1), random([a, b]), order=2)


def test_a_name_that_nothing_has_is_told():
    text = message(lambda x, w: md.checkpoint(named_layer, keep=["mixd"])(x, w), random([a]),
                   random([a, b]))  # fmt: skip
    assert (
        "checkpoint: nothing in named_layer is named 'mixd'. Did you mean `mixed`?; its names: "
        "mixed" in text
    )


def test_kept_values_on_layouts_and_backends():
    stacked = random([layers, md.Dimension("a", 5), b], seed=1)
    x = random([md.Dimension("a", 5)])

    def model(x, stacked):
        layer = md.checkpoint(named_layer, keep=["mixed"])
        return md.value_and_grad(summed(scanned(layer)), (0, 1))(x, stacked)

    expected = arrays_of(run(model, x, stacked))
    for backend, layout in [("numpy", "a:x; b:y"), ("numpy", "a:y+x"), ("jax", "b:x; a:y")]:
        found = run(model, x, stacked, mesh="x:2,y:2", layout=layout, backend=backend)
        for mine, want in zip(arrays_of(found), expected, strict=True):
            assert_close(mine, want)


# Matrix products.


def mixing(x, w):
    """Products between cheap operations: nothing of the last one is read again."""
    h = md.tanh(md.einsum(md.sin(x), w, over="a"))
    return md.einsum(md.exp(h), w, over="b")


def reference_mixing(x, w):
    return jnp.exp(jnp.tanh(jnp.sin(x) @ w)) @ w.T


def test_kept_products_change_no_number():
    ours = md.checkpoint(mixing, products=True)
    assert_agree(ours, reference_mixing, random([a]), random([a, b]), order=2)
    stacked = random([layers, a, b], seed=1)

    def theirs(x, stacked):
        for w in stacked:
            x = reference_mixing(x, w)
        return x

    assert_agree(scanned(ours), theirs, random([a]), stacked, order=2)
    around = md.checkpoint(scanned(mixing), products=True)
    assert_agree(around, theirs, random([a]), stacked, order=2)


@pytest.mark.parametrize("products", [False, True])
def test_what_is_computed_again_is_what_jax_computes_again(products):
    x, w = random([a]), random([a, b])
    policies = jax.checkpoint_policies
    policy = policies.dots_saveable if products else policies.nothing_saveable
    theirs = jax.checkpoint(reference_mixing, policy=policy)
    gradient = jax.grad(lambda x, w: jnp.sum(jnp.square(theirs(x, w))), (0, 1))
    text = jax.jit(gradient).lower(np.asarray(x), np.asarray(w)).as_text()
    ours = operations(md.grad(squared(md.checkpoint(mixing, products=products)), (0, 1)), x, w)
    for name in ("sine", "tanh"):
        assert ours.count({"sine": "sin"}.get(name, name)) == text.count(f"stablehlo.{name} ")
    assert sum(op.startswith("einsum") for op in ours) == text.count("stablehlo.dot_general ")


def attending(q, k, w):
    mixed = md.name(md.attention(q, k, k, over="memory_length"), "mixed")
    return md.einsum(md.tanh(mixed), w, over="kv")


def reference_attending(q, k, w):
    weights = jax.nn.softmax(q @ k.T / jnp.sqrt(q.shape[-1]), axis=-1)
    return jnp.tanh(weights @ k) @ w


@pytest.mark.long
@pytest.mark.parametrize("policy", [{"keep": "mixed"}, {"products": True}])
def test_attention_that_is_kept_is_not_computed_again(policy):
    length, memory, kv = md.dims(length=3, memory_length=5, kv=4)
    inputs = random([length, kv]), random([memory, kv], seed=1), random([kv, a], seed=2)
    assert_agree(md.checkpoint(attending, **policy), reference_attending, *inputs, order=2)
    again = operations(md.grad(squared(md.checkpoint(attending)), (0, 1, 2)), *inputs)
    kept = operations(md.grad(squared(md.checkpoint(attending, **policy)), (0, 1, 2)), *inputs)
    assert (again.count("attention"), kept.count("attention")) == (2, 1)


def test_products_that_a_scan_cannot_stack_are_computed_again():
    """They have its dim already."""
    table = random([layers, a], seed=3)

    def layer(x, w):
        return md.sin(x) * md.sum(md.tanh(md.einsum(md.cos(x), table, over="a"))) * w

    def theirs(x, stacked):
        for w in stacked:
            x = jnp.sin(x) * jnp.tanh(table.data @ jnp.cos(x)).sum() * w
        return x

    stacked = random([layers, a], seed=1)
    ours = scanned(md.checkpoint(layer, products=True))
    assert_agree(ours, theirs, random([a]), stacked, order=2)


def test_kept_products_on_layouts_and_backends():
    stacked = random([layers, md.Dimension("a", 5), b], seed=1)
    x = random([md.Dimension("a", 5)])

    def model(x, stacked):
        layer = md.checkpoint(mixing, products=True)
        return md.value_and_grad(summed(scanned(layer)), (0, 1))(x, stacked)

    expected = arrays_of(run(model, x, stacked))
    for backend, layout in [("numpy", "a:x; b:y"), ("jax", "b:x; a:y")]:
        found = run(model, x, stacked, mesh="x:2,y:2", layout=layout, backend=backend)
        for mine, want in zip(arrays_of(found), expected, strict=True):
            assert_close(mine, want)


def test_a_small_loop_with_a_checkpoint_in_it_compiles():
    """XLA:CPU makes one kernel of a small loop, and ended the process at its barrier."""
    x, w = random(md.dims(a=3)), random(md.dims(layers=4, a=3), seed=1)

    def gradient(layer):
        def body(carry, w):
            one, other = layer(carry, w)
            return one + md.sin(other), None

        return md.grad(lambda x, w: md.sum(md.scan(body, x, w, dim="layers")[0]), (0, 1))

    def layer(carry, w):
        return md.sin(carry) * w, md.cos(carry) + w

    expected = run(gradient(layer), x, w)
    for found, want in zip(
        run(gradient(md.checkpoint(layer)), x, w, backend="jax"), expected, strict=True
    ):
        assert_close(found, want)
