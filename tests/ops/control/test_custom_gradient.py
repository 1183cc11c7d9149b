"""Custom gradients: the rule given is the one used, also in bodies and when differentiated."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshdsl as md
from tests.ops.agreement import arrays_of, assert_agree, assert_close, message, random, run

steps, a, b = md.dims(steps=4, a=5, b=3)


@md.custom_gradient
def product(x, w):
    """x w w^T, whose rule uses a value of the forward pass; three times too large."""
    h = md.tanh(md.einsum(x, w, over="a"))

    def backward(g):
        slope = 3 * md.einsum(g, w, over="a") * (1 - md.square(h))
        by_w = md.outer(md.multiply, x, slope) + md.outer(md.multiply, 3 * g, h)
        return md.einsum(slope, w, over="b"), by_w

    return md.einsum(h, w, over="b"), backward


@jax.custom_vjp
def jax_product(x, w):
    return jnp.tanh(x @ w) @ w.T


def jax_forward(x, w):
    h = jnp.tanh(x @ w)
    return h @ w.T, (x, w, h)


def jax_backward(residuals, g):
    x, w, h = residuals
    slope = 3 * (g @ w) * (1 - h**2)
    return slope @ w.T, jnp.outer(x, slope) + 3 * jnp.outer(g, h)


jax_product.defvjp(jax_forward, jax_backward)


def inputs():
    return random([a]), random([a, b], seed=1)


def test_the_rule_is_the_gradient():
    assert_agree(product, jax_product, *inputs(), order=1, forward=False)
    assert_both_modes_agree(product)


def assert_both_modes_agree(function):
    """JAX's custom_vjp has no forward mode to compare with."""
    jacobians = [
        run(md.jacobian(function, (0, 1), mode), *inputs()) for mode in ("forward", "reverse")
    ]
    for forward, reverse in zip(*jacobians, strict=True):
        assert_close(forward, reverse)


def test_in_a_scan_a_cond_and_a_checkpoint():
    def ours(x, w):
        def body(c, _):
            c = md.cond(md.sum(c) > -100, lambda: product(c, w), lambda: c)
            return md.checkpoint(product)(c, w) * 0.5, None

        return md.scan(body, x, None, steps)[0]

    def theirs(x, w):
        for _ in range(4):
            x = jax_product(jax_product(x, w), w) * 0.5
        return x

    assert_agree(ours, theirs, *inputs(), order=1, forward=False)
    assert_both_modes_agree(ours)


def test_straight_through_rounding_and_its_second_derivative():
    @md.custom_gradient
    def through(x):
        return md.round(x), lambda g: g

    x = random([a], -3, 3)
    assert_agree(through, lambda x: x + jax.lax.stop_gradient(jnp.round(x) - x), x)
    slope = run(md.grad(lambda x: md.sum(md.square(through(x)))), x)
    assert_close(slope, 2 * np.round(x.data))
    second = md.grad(lambda x: md.sum(md.grad(lambda x: md.sum(through(x) ** 3))(x)))
    assert_close(run(second, x), 6 * np.round(x.data))  # the rule holds there, too


def test_a_rule_that_reads_forward_values_is_differentiated_through_them():
    @md.custom_gradient
    def sine(x):
        c = md.cos(x)
        return md.sin(x), lambda g: g * c

    assert_agree(sine, jnp.sin, inputs()[0], order=2)


def test_what_a_rule_reads_is_kept_once():
    @md.custom_gradient
    def exponential(x):
        y = md.exp(x)
        return y, lambda g: g * y

    def ours(x):
        return md.scan(lambda c, _: (exponential(-c), None), x, None, steps)[0]

    def theirs(x):
        for _ in range(4):
            x = jnp.exp(-x)
        return x

    assert_agree(ours, theirs, inputs()[0], order=2)
    program = md.jit(md.grad(lambda x: md.sum(ours(x))), backend="numpy").lower(inputs()[0])
    forward = next(i for i in program.block.instructions if i.op == "scan")
    assert [v.shape.names for v in forward.outputs] == [("a",), ("steps", "a")]  # the end, and y


def test_a_number_that_the_rule_uses_too_is_no_value_that_it_reads():
    @md.custom_gradient
    def wave(x):
        y = md.sin(x * 3.5)
        return y, lambda g: g * y * 3.5

    def loss(x):
        return md.sum(md.scan(lambda c, _: (wave(c), None), x, None, steps)[0])

    (op,) = md.jit(wave).trace(inputs()[0]).operations
    assert [t.shape.names for t in op.params["body"].outputs] == [("a",)]
    program = md.jit(md.grad(loss), backend="numpy").lower(inputs()[0])
    forward = next(i for i in program.block.instructions if i.op == "scan")
    assert [v.shape.names for v in forward.outputs] == [("a",), ("steps", "a")]  # the end, and y


def test_a_tensor_that_only_the_rule_uses_is_a_constant():
    def loss(x, w):
        scaled = md.custom_gradient(lambda x: (md.sin(x), lambda g: g * md.sum(w)))
        return md.sum(scaled(x) * md.sum(w))

    x, w = inputs()
    by_x, by_w = run(md.grad(loss, (0, 1)), x, w)
    assert_close(by_x, np.full(5, w.data.sum() ** 2))
    assert_close(by_w, np.full((5, 3), np.sin(x.data).sum()))


def test_trees_flags_and_what_has_no_gradient():
    rows = md.named(np.array([2, 0, 1], np.int32), [b])

    @md.custom_gradient
    def looked_up(tree, scale, *, twice):
        found = md.take(tree["table"], tree["rows"], "a") * scale
        count = md.full([], 7, "int32")

        def backward(g):
            assert g["count"] is None
            by_scale = md.sum(g["found"]) * (2 if twice else 1)
            return {"table": md.ones([a], "float64") * by_scale, "rows": None}, by_scale

        return {"found": found, "count": count}, backward

    def ours(table, scale, rows):
        return looked_up({"table": table, "rows": rows}, scale, twice=True)["found"]

    def loss(table, scale, rows):
        return md.sum(ours(table, scale, rows))

    table, scale = inputs()[0], random([], seed=4)
    assert_close(run(ours, table, scale, rows), table.data[rows.data] * scale.data)
    by_table, by_scale = run(md.grad(loss, (0, 1)), table, scale, rows)
    assert_close(by_table, np.full(5, 6.0))
    assert_close(by_scale, 6.0)


def test_none_is_zero():
    @md.custom_gradient
    def first(x, y):
        return x * y, lambda g: (g * y, None)

    by_x, by_y = run(md.grad(lambda x, y: md.sum(first(x, y)), (0, 1)), inputs()[0], inputs()[0])
    assert_close(by_x, inputs()[0].data)
    assert_close(by_y, np.zeros(5))


@pytest.mark.parametrize("backend", ["numpy", "jax"])
@pytest.mark.parametrize("layout", ["a:x; b:y", "a:x+y"])
def test_layouts_change_nothing_on_sizes_that_do_not_divide(layout, backend):
    def model(x, w):
        return md.value_and_grad(lambda x, w: md.sum(md.sin(product(x, w))), (0, 1))(x, w)

    expected = arrays_of(run(model, *inputs()))
    found = run(model, *inputs(), mesh="x:2,y:2", layout=layout, backend=backend)
    for mine, want in zip(arrays_of(found), expected, strict=True):
        assert_close(mine, want)


def test_without_a_gradient_nothing_is_left_of_the_rule():
    program = md.jit(product, backend="numpy").lower(*inputs())
    assert [i.op for i in program.block.instructions] == ["einsum", "tanh", "einsum"]


def test_its_backward_pass_is_told_as_such():
    graph = md.jit(md.grad(lambda x, w: md.sum(product(x, w)), (0, 1))).trace(*inputs())
    squares = [op for op in graph.operations if op.name == "square"]
    assert [str(op.source).endswith("(backward)") for op in squares] == [True]


# Mistakes.


def test_mistakes_are_told():
    def decorated(function):
        return md.custom_gradient(function)

    x, w = inputs()
    for function, text in [
        (lambda x, w: x, "custom_gradient: the function must return a pair: (result, backward)"),
        (
            lambda x, w: (x, lambda g: g),
            "custom_gradient: backward must return a tuple with one gradient for each of 2 args",
        ),
        (
            lambda x, w: (x, lambda g: (g.sum(), {"w": w})),
            "custom_gradient: backward returns what does not fit the arguments: gradient/0 is f64[]"
            " (made at tests/ops/control/test_custom_gradient.py:",
        ),
        (
            lambda x, w: (x, lambda g: (g, {"w": w})),
            "gradient/1/w is the gradient of nothing: no tensor stands there",
        ),
    ]:
        text = text.replace("args", "arguments")
        assert text in message(lambda x, w, f=function: decorated(f)(x, w), x, w)

    def of_indices(x):
        return decorated(lambda i: (i, lambda g: md.ones([a], "int32")))(md.cast(x, "int32"))

    assert "gradient/0: s32[a=5] has no gradient; return None" in message(of_indices, x)


def test_a_tensor_that_is_no_argument_is_told_when_its_gradient_is_asked_for():
    def loss(x, w):
        scaled = md.custom_gradient(lambda x: (x * md.sum(w), lambda g: g))
        return md.sum(scaled(x))

    x, w = inputs()
    assert_close(run(md.grad(loss), x, w), np.ones(5))
    text = message(md.grad(loss, 1), x, w)
    assert "custom_gradient: `<lambda>` uses f64[a=5, b=3] (made at tests/ops/control/test_" in text
    assert "so its rule gives no gradient for it; make it an argument, or give it to " in text
