"""Cond: values, gradients and gradients of gradients are those of the branch that is taken."""

import jax
import jax.numpy as jnp
import pytest

import meshdsl as md
from meshdsl.reports.explain import explain
from tests.ops.agreement import arrays_of, assert_agree, assert_close, message, random, run

steps, a, b = md.dims(steps=4, a=5, b=3)


def choose(x, w):
    """One branch contracts and keeps a vector, the other keeps scalars; both capture w."""
    return md.cond(
        md.sum(x) > 0,
        lambda x: md.sin(x) * md.einsum(md.tanh(w), md.sin(x), over="a").sum(),
        lambda x: x * md.exp(md.mean(w)) * md.cos(md.sum(x)),
        x,
    )


def jax_choose(x, w):
    return jax.lax.cond(
        x.sum() > 0,
        lambda x: jnp.sin(x) * (jnp.tanh(w).T @ jnp.sin(x)).sum(),
        lambda x: x * jnp.exp(w.mean()) * jnp.cos(x.sum()),
        x,
    )


def both_ways():
    """Returns an x that takes the first branch, and one that takes the second."""
    return random([a], -0.2, 1), random([a], -1, 0.2)


@pytest.mark.long
@pytest.mark.parametrize("way", [0, 1])
def test_either_branch_with_two_derivatives(way):
    assert_agree(choose, jax_choose, both_ways()[way], random([a, b], seed=1), order=2)


@pytest.mark.long
@pytest.mark.parametrize("way", [0, 1])
def test_trees_go_in_and_out_and_dims_may_come_in_another_order(way):
    w = random([a, b], seed=1)

    def ours(x, w):
        def first(state, scale):
            return {"y": [state["x"] * state["w"] * scale], "n": md.full([], 1, "int32")}

        def second(state, scale):
            return {"y": [state["w"].transpose(["b", "a"]) + scale], "n": md.full([], 2, "int32")}

        out = md.cond(md.sum(x) > 0, first, second, {"x": x, "w": w}, md.sum(x))
        return out["y"][0] * md.cast(out["n"], "float64")

    def theirs(x, w):
        return (x[:, None] * w * x.sum()) if way == 0 else 2 * (w + x.sum())

    assert_agree(ours, theirs, both_ways()[way], w, order=2)


def test_a_branch_may_return_an_input_or_a_constant():
    def ours(x):
        flipped = md.cond(
            md.sum(x) < 0, lambda x: (x, 0.0), lambda x: (md.zeros([a], x.dtype), 1.0), x
        )
        return flipped[0] * x + md.cast(flipped[1], "float64")  # fmt: skip

    assert_agree(ours, lambda x: 0 * x + 1, both_ways()[0], order=2)
    assert_agree(ours, lambda x: x * x, both_ways()[1], order=2)


def test_an_input_that_only_one_branch_uses():
    def ours(x, y):
        return md.cond(md.sum(x) > 0, lambda: md.exp(x), lambda: md.sin(y))

    x, y = both_ways()
    assert_agree(ours, lambda x, y: jnp.exp(x) + 0 * y, x, y, order=2)
    assert_agree(ours, lambda x, y: jnp.sin(y) + 0 * x, y, x, order=2)


@pytest.mark.long
def test_a_cond_in_a_scan_and_a_scan_in_a_cond():
    xs = random([steps, a], seed=3)

    def ours(carry, xs, w):
        def body(c, x):
            c = choose(c + x, w)
            return c, c * x

        def unrolled():
            return md.scan(body, carry, xs, "steps", reverse=True)

        end, ys = md.cond(md.sum(w) > -100, unrolled, lambda: (carry, xs))
        return ys + end

    def theirs(carry, xs, w):
        def body(c, x):
            c = jax_choose(c + x, w)
            return c, c * x

        end, ys = jax.lax.scan(body, carry, xs, reverse=True)
        return ys + end

    assert_agree(ours, theirs, random([a]), xs, random([a, b], seed=1), order=2)


@pytest.mark.long
def test_conds_nest():
    def ours(x, w):
        def inner(x):
            return md.cond(md.sum(w) > 0, lambda: choose(x, w), lambda: choose(-x, w) * x)

        return md.cond(md.sum(x) > 0, inner, lambda x: x * w.sum("b"), x)

    def theirs(x, w):
        yes = jax.lax.cond(w.sum() > 0, lambda: jax_choose(x, w), lambda: jax_choose(-x, w) * x)
        return jnp.where(x.sum() > 0, yes, x * w.sum(1))

    for x in both_ways():
        for seed in (1, 2, 5):
            assert_agree(ours, theirs, x, random([a, b], seed=seed), order=1)


@pytest.mark.parametrize("where", ["inside", "outside"])
def test_with_checkpoint(where):
    def ours(x, w):
        def body(x):
            return md.sin(x) * md.tanh(md.einsum(w, md.cos(x), over="a")).sum()

        if where == "outside":
            return md.checkpoint(lambda x: md.cond(md.sum(x) > 0, body, lambda x: x * x, x))(x)
        return md.cond(md.sum(x) > 0, md.checkpoint(body), lambda x: x * x, x)

    def theirs(x, w):
        yes = jnp.sin(x) * jnp.tanh(w.T @ jnp.cos(x)).sum()
        return jnp.where(x.sum() > 0, yes, x * x)

    for x in both_ways():
        assert_agree(ours, theirs, x, random([a, b], seed=1), order=2)


LAYOUTS = ["a:x; b:y", "a:x+y", "b:y; a:x?", "b:y+x"]


@pytest.mark.parametrize("backend", ["numpy", "jax"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_change_nothing_on_sizes_that_do_not_divide(layout, backend):
    def model(x, w):
        return md.value_and_grad(lambda x, w: md.sum(md.sin(choose(x, w))), (0, 1))(x, w)

    w = random([a, b], seed=1)
    for x in both_ways() if backend == "numpy" or layout == LAYOUTS[0] else both_ways()[:1]:
        expected = arrays_of(run(model, x, w))
        found = run(model, x, w, mesh="x:2,y:2", layout=layout, backend=backend)
        for mine, want in zip(arrays_of(found), expected, strict=True):
            assert_close(mine, want)


# Mistakes.


def test_a_predicate_must_be_one_bool():
    text = message(lambda x: md.cond(x > 0, lambda: x, lambda: -x), random([a]))
    assert (
        "cond: the predicate must be bool[], the same for the whole program, got bool[a=5]" in text
    )
    assert "compare or reduce it first, as in md.sum(x) > 0, or choose element by element" in text
    text = message(lambda x: md.cond(md.sum(x), lambda: x, lambda: -x), random([a]))
    assert "cond: the predicate must be bool[], the same for the whole program, got f64[]" in text


def test_branches_that_differ_are_told_together():
    def model(x):
        return md.cond(
            md.sum(x) > 0,
            lambda: {"p": x, "q": x, "r": x},
            lambda: {"p": md.cast(x, "float32"), "q": x.sum("a"), "r": x},
        )

    text = message(model, random([a]))
    assert (
        "cond: the branches must return the same dims and dtypes: result/p is f64[a=5] if " in text
    )
    assert " if true (made at " in text
    assert "and f32[a=5] if false (made at tests/ops/control/test_cond.py:" in text
    assert "; result/q is f64[a=5] if true" in text
    assert "result/r" not in text
    text = message(lambda x: md.cond(md.sum(x) > 0, lambda: x, lambda: (x, x)), random([a]))
    assert "cond: the branches return different structures: PyTreeDef(*) if true, " in text


# What is lowered.


def lowered(function, *inputs, **kwargs):
    program = md.jit(function, backend="numpy", **kwargs).lower(*inputs)
    return program, [i for i in program.block.instructions if i.op == "cond"]


def test_what_no_result_needs_is_not_computed():
    def model(x, w):
        y, _ = md.cond(md.sum(x) > 0, lambda: (md.sin(x), md.exp(w)), lambda: (x, w))
        return y

    _, (cond,) = lowered(model, random([a]), random([a, b]))
    assert [i.op for i in cond.bodies[0].instructions] == ["sin"]
    assert [len(body.inputs) for body in cond.bodies] == [1, 1]
    assert len(cond.inputs) == 2


def test_slots_for_the_backward_pass_are_shared_between_the_branches():
    def loss(x):
        return md.sum(md.cond(md.sum(x) > 0, lambda: md.exp(md.sin(x)), lambda: md.exp(md.cos(x))))

    _, (forward, backward) = lowered(md.grad(loss), random([a]))
    kept = [v for v in forward.outputs if v.shape]
    assert len(kept) == 1  # the result, of whichever branch; what sin and cos need is x
    assert {i.op for body in backward.bodies for i in body.instructions} >= {"cos", "sin"}


def test_a_slot_holds_what_either_branch_needs():
    def loss(x):
        return md.sum(md.cond(md.sum(x) > 0, lambda: md.sin(md.exp(x)), lambda: md.sin(md.tanh(x))))

    _, (forward, backward) = lowered(md.grad(loss), random([a]))
    assert len([v for v in forward.outputs if v.shape]) == 1  # exp's or tanh's, read by cos
    assert all("cos" in [i.op for i in body.instructions] for body in backward.bodies)


def test_a_partial_sum_leaves_a_cond_as_such():
    def model(x, w):
        y = md.cond(
            md.sum(x) > 0, lambda: md.einsum(x, w, over="a"), lambda: md.zeros([b], "float64")
        )
        return y + md.einsum(x, w, over="a")  # fmt: skip

    four = md.Dimension("a", 4)
    program, (cond,) = lowered(model, random([four]), random([four, b]), mesh="x:2", layout="a:x")
    assert cond.outputs[0].layout.partial_axes == ("x",)
    assert [c.kind for c in program.collectives if c.dims] == ["all_reduce"]


def test_costs_count_the_worse_branch_and_list_both():
    def model(x, w):
        def dear():
            return md.tanh(md.einsum(x, w, over="a"))

        def cheap():
            return md.outer(md.add, md.sin(md.max(x, "a")), w.sum("a"))

        return md.cond(md.sum(w) > 0, dear, cheap)

    x, w = (
        random([md.Dimension("batch", 4), md.Dimension("a", 8)]),
        random([md.Dimension("a", 8), b]),
    )
    program, _ = lowered(model, x, w, mesh="x:2", layout="a:x")
    assert [c.kind for c in program.collectives] == ["all_reduce"] * 4  # for the predicate, 1 and 2
    decided = program.collectives[0].wire_bytes
    dear = 4 * 3 * 8  # all_reduce of [batch, b] in float64 over two devices sends it once
    assert program.wire_bytes == decided + dear < sum(c.wire_bytes for c in program.collectives)
    einsum = 2 * 4 * 4 * 3
    assert program.flops == 4 * 3 + einsum + 4 * 3  # the sum of w, and the dear branch
    assert program.peak_bytes >= x.data.nbytes / 2 + w.data.nbytes / 2 + dear


def test_it_is_printed_with_both_branches():
    program, _ = lowered(choose, random([a]), random([a, b]), mesh="x:2", layout="a:x")
    text = str(program)
    assert "\n  if choose" in text
    assert "\n  else" in text
    assert "gives choose" in text
    assert "Of a cond both branches are listed" in str(explain(program))
