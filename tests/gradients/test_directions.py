"""Derivatives along directions, Jacobians and Hessians, against JAX's own.

`tests/ops` compares every operation with `jax.jvp` (`assert_agree`); here are programs of them,
with bodies, on meshes.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshdsl as md
from tests.ops.agreement import assert_close, message, random, run

batch, embed, d_ff, steps = md.dims(batch=4, embed=6, d_ff=8, steps=3)
X, W, V = random([batch, embed]), random([steps, embed, d_ff], seed=1), random([d_ff], seed=2)
WAYS = random([batch, embed], seed=3), random([steps, embed, d_ff], seed=4), random([d_ff], seed=5)
MESHES = {
    "one device": {"backend": "numpy"},
    "tensor": {"mesh": "data:2,model:2", "layout": "batch:data; d_ff:model", "backend": "numpy"},
    "stored": {"mesh": "x:4", "layout": "batch:x; w/d_ff:x; x/embed:-", "backend": "numpy"},
    "jax": {"mesh": "data:2,model:2", "layout": "batch:data; d_ff:model", "backend": "jax"},
}


def layer(x, w, v):
    h = md.tanh(md.einsum(x, w, over="embed") + v)
    return x + md.einsum(h, w, over="d_ff")


def jax_layer(x, w, v):
    return x + jnp.tanh(x @ w + v) @ w.T


def scanned(x, w, v):
    return md.scan(lambda x, w: (layer(x, w, v), md.sum(x, "embed")), x, w, "steps")


def jax_scanned(x, w, v):
    return jax.lax.scan(lambda x, w: (jax_layer(x, w, v), x.sum(1)), x, w)


def checkpointed(x, w, v):
    block = md.checkpoint(lambda x, w: layer(x, w, v))
    return md.scan(lambda x, w: (block(x, w), md.sum(x, "embed")), x, w, "steps")


def chosen(x, w, v):
    end, sums = scanned(x, w, v)
    positive = md.cond(md.sum(end) > 0, lambda: md.sin(end), lambda: end * md.sum(v))
    return positive, md.cond(md.sum(end) < 0, lambda: sums, lambda: md.stop_gradient(sums) * 2.0)


def jax_chosen(x, w, v):
    end, sums = jax_scanned(x, w, v)
    one = jax.lax.cond(end.sum() > 0, lambda: jnp.sin(end), lambda: end * v.sum())
    stopped = jax.lax.stop_gradient(sums)
    return one, jax.lax.cond(end.sum() < 0, lambda: sums, lambda: stopped * 2.0)


def repeated(x, w, v):
    first = md.index(w, "steps", 0)
    end, count = md.while_loop(
        lambda state: state[1] < 3,
        lambda state: (layer(state[0], first, v), state[1] + 1),
        (x, md.full([], 0, "int32")),
    )
    return end, md.cast(count, x.dtype) * md.sum(v)


def jax_repeated(x, w, v):
    def body(state):
        return jax_layer(state[0], w[0], v), state[1] + 1

    end, count = jax.lax.while_loop(lambda state: state[1] < 3, body, (x, 0))
    return end, count * v.sum()


PROGRAMS = {
    "scan": (scanned, jax_scanned),
    "checkpoint": (checkpointed, jax_scanned),
    "cond": (chosen, jax_chosen),
    "while_loop": (repeated, jax_repeated),
}


@pytest.mark.parametrize("where", MESHES)
@pytest.mark.parametrize("name", PROGRAMS)
def test_tangents_go_through_bodies_on_every_layout(name, where):
    ours, theirs = PROGRAMS[name]

    def along(x, w, v, ways):
        return md.jvp(ours, (x, w, v), ways)

    found = run(along, X, W, V, WAYS, **MESHES[where])
    arrays = [a.data for a in (X, W, V)]
    expected = jax.jvp(theirs, arrays, [way.data for way in WAYS])
    for mine, other in zip(found, expected, strict=True):
        for one, two in zip(mine, other, strict=True):
            assert_close(one, two)


def test_a_loop_keeps_nothing_for_its_tangents():
    """One scan with three tangents, and nothing stacked but the results."""
    graph = md.jit(lambda x, w, v, ways: md.jvp(scanned, (x, w, v), ways)).trace(X, W, V, WAYS)
    (scan,) = [op for op in graph.operations if op.name == "scan"]
    assert scan.params["carries"] == 2
    stacked = [t.shape.names for t in scan.outputs[2:]]
    assert stacked == [("steps", "batch")] * 2


def test_tangents_cost_two_more_products():
    x, w = md.spec([batch, embed]), md.spec([embed, d_ff])

    def model(x, w):
        return md.einsum(x, w, over="embed")

    plain = md.jit(model).lower(x, w).flops
    both = md.jit(lambda x, w, a, b: md.jvp(model, (x, w), (a, b))).lower(x, w, x, w).flops
    assert both == pytest.approx(3 * plain, rel=0.05)


def test_a_custom_gradient_is_transposed():
    @md.custom_gradient
    def thrice(x):
        return md.sin(x), lambda g: 3.0 * g

    _, tangent = run(lambda x, t: md.jvp(thrice, (x,), (t,)), X, WAYS[0])
    assert_close(tangent, 3 * WAYS[0].data)


def test_attention_has_tangents():
    from meshdsl.ops.products.attention_reference import attention_reference

    length, memory, heads, kv = md.dims(length=5, memory_length=5, heads=2, kv=4)
    q, k, v = random([heads, length, kv]), random([heads, memory, kv]), random([memory, kv])
    ways = tuple(random(t.dims, seed=9 + i) for i, t in enumerate((q, k, v)))

    def along(attention):
        def model(q, k, v, ways):
            return md.jvp(lambda *t: attention(*t, causal=True), (q, k, v), ways)[1]

        return run(model, q, k, v, ways)

    assert_close(along(md.attention), along(attention_reference))
    step = 1e-6
    ends = [
        np.asarray(
            run(
                lambda q, k, v: md.attention(q, k, v, causal=True),
                *(md.named(t.data + s * w.data, t.dims) for t, w in zip((q, k, v), ways)),  # noqa: B905
            )
        )
        for s in (step, -step)
    ]
    assert_close(along(md.attention), (ends[0] - ends[1]) / (2 * step), 1e-8)


def test_what_does_not_move_has_no_tangent():
    def model(tree, count):
        still = md.stop_gradient(tree["x"]) + md.round(tree["x"])
        return {"moving": md.sin(tree["x"]), "still": still, "count": count + 1}

    count = md.named(np.int32(3), [])
    value, tangent = run(
        lambda x, t, n: md.jvp(model, ({"x": x, "y": x}, n), ({"x": t, "y": None}, None)),
        X,
        WAYS[0],
        count,
    )
    assert tangent["count"] is None
    assert int(value["count"]) == 4
    assert not np.asarray(tangent["still"]).any()
    assert_close(tangent["moving"], np.cos(X.data) * WAYS[0].data)


@pytest.mark.long
def test_forward_over_reverse_and_reverse_over_forward_are_the_hessian():
    def loss(x, w, v):
        return md.sum(md.sin(scanned(x, w, v)[0]))

    def jax_loss(x, w, v):
        return jnp.sin(jax_scanned(x, w, v)[0]).sum()

    arrays, ways = [a.data for a in (X, W, V)], [way.data for way in WAYS]
    expected = jax.jvp(jax.grad(jax_loss, (0, 1, 2)), arrays, ways)[1]
    mesh = MESHES["tensor"]
    forward = run(
        lambda x, w, v, ways: md.hessian_vector_product(loss, (x, w, v), ways),
        X,
        W,
        V,
        WAYS,
        **mesh,
    )
    reverse = run(
        lambda x, w, v, ways: md.grad(lambda *a: md.jvp(loss, a, ways)[1], (0, 1, 2))(x, w, v),
        *(X, W, V, WAYS),
        **mesh,
    )
    for mine, other, wanted in zip(forward, reverse, expected, strict=True):
        assert_close(mine, wanted)
        assert_close(other, wanted)
    alone = run(
        lambda x, w, v, way: md.hessian_vector_product(loss, (x, w, v), (None, way, None)),
        *(X, W, V, WAYS[1]),
    )
    _, only = jax.jvp(lambda w: jax.grad(jax_loss, 1)(arrays[0], w, arrays[2]), [W.data], [ways[1]])
    assert_close(alone, only)


@pytest.mark.parametrize("where", ["one device", "tensor", "jax"])
@pytest.mark.parametrize("mode", ["forward", "reverse", None])
def test_jacobians_are_jax_jacfwd(mode, where):
    def model(x, v):
        w = md.sin(md.outer(md.multiply, md.arange(embed, "float64"), v))
        return {"same": layer(x, w, v), "sums": md.sum(x, "embed")}

    def theirs(x, v):
        w = jnp.sin(jnp.arange(6.0)[:, None] * v)
        return {"same": jax_layer(x, w, v), "sums": x.sum(1)}

    found = run(md.jacobian(model, (0, 1), mode), X, V, **MESHES[where])
    expected = jax.jacfwd(theirs, (0, 1))(X.data, V.data)
    names = {
        "same": (("batch", "embed", "in_batch", "in_embed"), ("batch", "embed", "d_ff")),
        "sums": (("batch", "in_batch", "embed"), ("batch", "d_ff")),
    }
    for key in expected:
        assert tuple(one.dims.names for one in found[key]) == names[key]
        for mine, other in zip(found[key], expected[key], strict=True):
            assert_close(mine, other)


def test_a_jacobian_of_numbers_without_dims():
    x = md.named(np.float64(0.5), [])
    found = md.jacobian(lambda x: md.sin(x))(md.named(np.float32(0.5), []))
    assert found.dims == ()
    assert float(found) == pytest.approx(np.cos(0.5))
    found = run(
        md.jacobian(lambda x: (md.sin(x) * md.arange(batch, "float64"), md.arange(batch))), x
    )
    assert found[1] is None
    assert_close(found[0], np.cos(0.5) * np.arange(4))


@pytest.mark.parametrize("derivative", [md.grad, md.value_and_grad, md.jacobian])
@pytest.mark.parametrize(("wrt", "wrong"), [(2, "2"), ((0, -3), "-3"), ("x", "'x'")])
def test_the_number_of_no_argument_is_refused(derivative, wrt, wrong):
    function = derivative(lambda x, v: md.sum(x) * md.sum(v), wrt)
    text = message(lambda x, v: function(x, v), X, V)
    assert f"wrt={wrong}: give numbers of arguments by position, from 0; there are 2 of" in text
    assert "  at tests/gradients/test_directions.py:" in text


def test_a_number_from_the_end_is_that_of_an_argument():
    def loss(x, v):
        return md.sum(md.sin(x)) * md.sum(v)

    first, last = (md.jit(md.grad(loss, wrt), backend="numpy") for wrt in (1, -1))
    assert_close(last(X, V), first(X, V))
    assert first.trace(X, V).output_paths == last.trace(X, V).output_paths
    names = {op.params["name"] for op in last.trace(X, V).operations if op.name == "name"}
    assert names == {"gradients/v"}


@pytest.mark.long
def test_misfits_are_told_together():
    text = message(
        lambda x, v: md.jvp(lambda t: t["x"], ({"x": x, "v": v},), ({"x": v, "z": x},)), X, V
    )
    assert "jvp: the tangents do not fit the primals: " in text
    assert "tangents/0/x is f64[d_ff=8]" in text
    assert "tangents/0/z is the tangent of nothing: no tensor stands there" in text
    assert "tangents/0/v is missing; None stands for no change" in message(
        lambda x, v: md.jvp(lambda t: t["x"], ({"x": x, "v": v},), ({"x": x},)), X, V
    )
    assert "tangents/0: s32[batch=4] has no tangent; give None" in message(
        lambda x: md.jvp(lambda n: n, (md.arange(batch),), (md.arange(batch),)), X
    )
    assert "mode='both': choose from forward, reverse" in message(
        lambda x: md.jacobian(md.sin, mode="both")(x), X
    )
    assert "a Jacobian is of real numbers" in message(
        lambda x: md.jacobian(lambda x: md.fft.fft(x, "embed"))(x), X
    )
    assert "give a tangent for at least one of the primals" in message(
        lambda x: md.hessian_vector_product(md.sum, (x,), (None,)), X
    )
