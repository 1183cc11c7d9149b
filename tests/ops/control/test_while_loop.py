"""While loops run until their condition fails, alike on every layout, and have no gradient."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshdsl as md
from meshdsl.reports.explain import explain
from tests.ops.agreement import assert_agree, assert_close, message, random, run

steps, a, b = md.dims(steps=4, a=5, b=3)


def collatz(n):
    return md.while_loop(
        lambda s: s[0] > 1,
        lambda s: (md.where(s[0] % 2 == 0, s[0] // 2, 3 * s[0] + 1), s[1] + 1),
        (n, md.full([], 0, "int32")),
    )


def settle(x, w):
    """Multiplies by w w^T, scaled, until little is left; counts the turns."""

    def going_on(state):
        return (md.sum(md.square(state["x"])) > 1e-2) & (state["turns"] < 20)

    def turn(state):
        h = md.einsum(md.einsum(state["x"], w, over="a"), w, over="b")
        return {"x": h * 0.2, "turns": state["turns"] + 1}

    end = md.while_loop(going_on, turn, {"x": x, "turns": md.full([], 0, "int32")})
    return end["x"] * md.cast(end["turns"], "float64")


def jax_settle(x, w):
    turns = 0
    while (x**2).sum() > 1e-2 and turns < 20:
        x, turns = 0.2 * (w @ (x @ w)), turns + 1
    return x * turns


def test_it_is_python_s_while():
    steps = run(lambda: collatz(md.full([], 27, "int32")))
    assert [int(v) for v in steps] == [1, 111]
    assert_agree(settle, jax_settle, random([a]), random([a, b], seed=1), order=0)


def test_a_condition_that_fails_at_once_leaves_the_carry():
    assert_agree(
        lambda x: md.while_loop(lambda x: md.sum(x) > 100, lambda x: x + 1, x),
        lambda x: x,
        random([a]),
        order=0,
    )


def test_in_a_scan_and_around_a_scan_and_a_cond():
    xs = random([steps, a], 0.5, 1)

    def ours(xs):
        def body(total, x):
            halved = md.while_loop(lambda x: md.sum(x) > 1, lambda x: x / 2, x)
            return total + halved, md.sum(halved)

        def turn(x):
            end, sums = md.scan(body, x, xs, "steps")
            return md.cond(md.sum(sums) > 2, lambda: end + x, lambda: end)

        return md.while_loop(lambda x: md.sum(x) < 30, turn, xs.sum("steps"))

    def theirs(xs):
        x = xs.sum(0)
        while x.sum() < 30:
            end, sums = x, 0.0
            for row in xs:
                while row.sum() > 1:
                    row = row / 2
                end, sums = end + row, sums + row.sum()
            x = end + x if sums > 2 else end
        return x

    assert_agree(ours, theirs, xs, order=0)


@pytest.mark.parametrize("backend", ["numpy", "jax"])
@pytest.mark.parametrize("layout", ["a:x; b:y", "a:x+y", "b:y; a:x?", "b:y+x"])
def test_layouts_change_nothing_on_sizes_that_do_not_divide(layout, backend):
    x, w = random([a]), random([a, b], seed=1)
    found = run(settle, x, w, mesh="x:2,y:2", layout=layout, backend=backend)
    assert_close(found, jax_settle(x.data, w.data))


def test_gradients_around_it_flow_and_through_it_are_told():
    def around(x, w):
        turns = md.stop_gradient(settle(x, w))
        return md.sin(x) * turns.sum()

    def reference(x, w):
        turns = jax.lax.stop_gradient(jax_settle(jax.lax.stop_gradient(x), w))
        return jnp.sin(x) * turns.sum()

    x, w = random([a]), random([a, b], seed=1)
    found = run(md.grad(lambda x: md.sum(around(x, w))), x)
    assert_close(found, jnp.cos(x.data) * jax_settle(x.data, w.data).sum())
    text = message(md.grad(lambda x, w: md.sum(settle(x, w))), x, w)
    assert (
        "while_loop has no gradient, but one is needed at tests/ops/control/test_while_loop.py:"
        in text
    )
    assert 'end = md.while_loop(going_on, turn, {"x": x, "turns": md.full([], 0, "int32")})' in text
    assert "use md.scan over a fixed number of steps, or give the loop's start to" in text


def test_what_a_loop_holds_constant_needs_no_gradient():
    def loss(x, w):
        turned = md.while_loop(
            lambda x: md.sum(x) > 1, lambda x: x * md.stop_gradient(w), md.stop_gradient(x)
        )
        return md.sum(turned * x) + w

    x, w = random([a], 0.5, 1), md.named(np.float64(0.5), [])
    by_x, by_w = run(md.grad(loss, (0, 1)), x, w)
    halved = x.data
    while halved.sum() > 1:
        halved = halved / 2
    assert_close(by_x, halved)
    assert_close(by_w, 1.0)


def test_in_a_scan_the_missing_gradient_is_told_too():
    def loss(x):
        def body(c, _):
            return md.while_loop(lambda x: md.sum(x) > 1, lambda x: x / 2, c), None

        return md.sum(md.scan(body, x, None, steps)[0])

    text = message(md.grad(loss), random([a]))
    assert (
        "while_loop has no gradient, but one is needed at tests/ops/control/test_while_loop.py:"
        in text
    )


def test_mistakes_are_told():
    x = random([a])
    for function, text in [
        (
            lambda x: md.while_loop(lambda x: x > 0, lambda x: x, x),
            "while_loop: what the condition returns must be bool[], the same for the whole program,"
            " got bool[a=5] (made at ",
        ),
        (
            lambda x: md.while_loop(lambda x: (x, x), lambda x: x, x),
            "while_loop: the condition must return one tensor, bool[]",
        ),
        (
            lambda x: md.while_loop(lambda x: md.sum(x) > 0, lambda x: (x, x), x),
            "while_loop: the body returns a carry of another structure: ",
        ),
        (
            lambda x: md.while_loop(
                lambda s: md.sum(s["x"]) > 0, lambda s: {"x": s["x"].sum("a")}, {"x": x}
            ),
            "while_loop: the carry must keep its dims and dtypes: carry/x goes in as f64[a=5] and "
            "comes out as f64[] (made at tests/ops/control/test_while_loop.py:",
        ),
    ]:
        assert text in message(function, x)


# What is lowered.


def test_carries_that_nothing_needs_are_dropped_and_the_condition_s_are_kept():
    def model(x):
        return md.while_loop(
            lambda s: s["n"] < 3,
            lambda s: {"n": s["n"] + 1, "x": s["x"] * 2, "unused": md.exp(s["x"])},
            {"n": md.full([], 0, "int32"), "x": x, "unused": x},
        )["x"]

    program = md.jit(model, backend="numpy").lower(random([a]))
    (loop,) = [i for i in program.block.instructions if i.op == "while"]
    assert len(loop.outputs) == 2
    assert "exp" not in [i.op for i in loop.body.instructions]


def test_collectives_inside_count_once_and_the_reports_say_so():
    four, two = md.dims(a=4, b=2)
    specs = md.spec([four], "float64"), md.spec([four, two], "float64")
    program = md.jit(settle, "x:2,y:2", "a:x; b:y").lower(*specs)
    inside = {c.source.line: c.count for c in program.collectives}
    assert set(inside.values()) == {1}
    assert " wire × iterations" in str(program)
    assert "go on while going_on" in str(program)
    assert "Of a while loop one iteration is counted" in str(explain(program))


def test_what_a_body_captures_is_moved_once_before_the_loop():
    four, two = md.dims(a=4, b=2)

    def model(x, w):
        def turn(x):
            return md.einsum(x, w, w.rename(a="a2"), over=["a", "b"]).rename(a2="a") * 0.1

        return md.while_loop(lambda x: md.max(x) > 1, turn, x)

    program = md.jit(model, "x:2", "b:x; a:x?").lower(md.spec([four]), md.spec([four, two]))
    (loop,) = [i for i in program.block.instructions if i.op == "while"]
    inside = [i for i, _ in loop.body.walk() if i.is_collective]
    assert all(len(i.inputs[0].shape) == 1 for i in inside)  # the weights stay where they are


def test_the_peak_holds_the_carry_and_the_next_one():
    big = md.Dimension("big", 1000)

    def halved(x):
        return md.while_loop(lambda x: md.sum(x) > 1, lambda x: x / 2, x)

    program = md.jit(halved).lower(md.spec([big]))
    vector = 4 * big.size
    assert 3 * vector <= program.peak_bytes < 3 * vector + 100  # the input, the carry, the next
