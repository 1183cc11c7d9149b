"""Checking for NaN and infinities: the operation that made the first one is told."""

import numpy as np
import pytest

import meshdsl as md
from meshdsl.running import finite
from tests.ops.agreement import random

a, b, steps = md.dims(a=7, b=4, steps=3)
LAYOUTS = [(None, "", "jax"), ("x:2,y:2", "a:x; b:y", "jax"), ("x:2,y:2", "a:x; b:y", "numpy")]
X = md.named(np.arange(28.0).reshape(7, 4), [a, b])


def told(function, *inputs, mesh=None, layout="", backend="jax", check_finite=True, **kwargs):
    """Returns the lines of the error that a call raises."""
    jitted = md.jit(function, mesh, layout, backend, check_finite=check_finite, **kwargs)
    with pytest.raises(FloatingPointError) as error:
        jitted(*inputs)
    return [line.strip() for line in str(error.value).splitlines()]


@pytest.mark.parametrize(("mesh", "layout", "backend"), LAYOUTS)
def test_the_operation_its_line_and_its_operands_are_told(mesh, layout, backend):
    def program(x):
        y = x - 5
        z = 1 / y
        return {"loss": md.sum(z * 2), "x": x}

    lines = told(program, X, mesh=mesh, layout=layout, backend=backend)
    start = program.__code__.co_firstlineno
    assert lines == [
        "the result loss: f64[] is not finite",
        "first made by divide, of finite operands: 1 infinite of 28 values in f64[a=7, b=4]",
        f"at tests/running/test_finite.py:{start + 2}  z = 1 / y",
        f"operand 1: f64[]  made at tests/running/test_finite.py:{start + 2}",
        f"operand 2: f64[a=7, b=4]  made at tests/running/test_finite.py:{start + 1}",
    ]


@pytest.mark.parametrize(("mesh", "layout", "backend"), LAYOUTS)
def test_in_a_scan_the_step_is_told(mesh, layout, backend):
    def program(x):
        def body(total, n):
            bad = md.log(total - md.cast(n, "float64") * 1e3)
            return total + md.where(n > 1, bad, 0), None

        return md.scan(body, x + 1, md.arange(steps), "steps")[0]

    lines = told(program, X, mesh=mesh, layout=layout, backend=backend)
    assert lines[1] == (
        "first made by log, of finite operands: 28 NaN of 28 values in f64[a=7, b=4], step 2 of "
        "steps (3)"
    )


def test_a_backward_pass_is_told_as_such():
    lines = told(md.grad(lambda x: md.sum(md.sqrt(x))), X)
    assert lines[1] == (
        "first made by divide, of finite operands: 1 infinite of 28 values in f64[a=7, b=4]"
    )
    assert "(backward)  lines = told(md.grad(" in lines[2]


@pytest.mark.parametrize(("mesh", "layout", "backend"), LAYOUTS)
def test_of_several_results_the_first_origin_in_the_program_is_named(mesh, layout, backend):
    """The gradient, which is the first result, has an origin of its own: log(0) has slope 1 / 0."""

    def program(x):
        loss, gradient = md.value_and_grad(lambda x: md.sum(md.log(x)))(x)
        return {"gradient": gradient, "loss": loss}

    lines = told(program, X, mesh=mesh, layout=layout, backend=backend)
    assert lines[0] == "the result loss: f64[] is not finite"
    assert lines[1].startswith("first made by log, of finite operands: 1 infinite of 28 values")
    assert "(backward)" not in lines[2]


def test_what_is_made_and_dropped_again_does_not_count():
    def program(x):
        safe = md.where(x > 0, md.log(x), 0)  # log(0) is made here
        masked = md.where(x > 3, x, -np.inf)
        return safe + md.softmax(masked, "a")

    jitted = md.jit(program, "x:2", "a:x", check_finite=True)
    assert np.isfinite(np.asarray(jitted(X))).all()


@pytest.mark.parametrize("backend", ["numpy", "jax"])
def test_pads_do_not_count(backend):
    def program(x):  # shards of 7 over 4 have a pad
        return md.sum(1 / (x["b", 0] + 1))

    assert float(md.jit(program, "x:4", "a:x", backend, check_finite=True)(X)) > 0


def test_inputs_and_constants_can_be_to_blame():
    bad = md.named(np.array([1.0, np.nan, np.inf]), ["n"])
    assert told(lambda state: {"y": state["x"] * 2}, {"x": bad}) == [
        "the result y: f64[n=3] is not finite",
        "it comes from the input state/x: 1 NaN and 1 infinite of 3 values in f64[n=3]",
    ]
    lines = told(lambda x: md.where(x > 3, x, np.inf) + 1, X)
    assert lines[1].startswith("it comes from a constant: full at tests/running/test_finite.py:")


def test_branches_loops_and_checkpoints_are_searched():
    def branch(x):
        return md.cond(md.sum(x) > 0, lambda: md.sum(1 / x), lambda: md.sum(x))

    def loop(x):
        return md.while_loop(lambda c: c[0] < 4, lambda c: (c[0] + 1, md.log(c[1])), (_one(), x))[1]

    def remade(x):
        return md.grad(md.checkpoint(lambda x: md.sum(md.sqrt(x - 1) * x)))(x)

    def custom(x):
        return md.custom_gradient(lambda x: (md.log(x), lambda g: g))(x)

    for function, name in ((branch, "divide"), (loop, "log"), (remade, "sqrt"), (custom, "log")):
        assert told(function, X, mesh="x:2", layout="a:x")[1].startswith(f"first made by {name},")


def _one():
    return md.full([], 1, "int32")


def test_check_finite_checks_what_no_result_shows():
    def program(x):
        md.check_finite({"y": 1 / x, "count": _one()})
        return x

    lines = told(program, X, mesh="x:2,y:2", layout="a:x; b:y", check_finite=False)
    assert lines[0] == "check_finite: f64[a=7, b=4] is not finite"
    assert lines[1].endswith('md.check_finite({"y": 1 / x, "count": _one()})')
    assert lines[2].startswith("first made by divide, of finite operands: 1 infinite of 28 values")


def test_check_finite_in_a_loop_tells_the_first_step():
    def program(x):
        def body(c, n):
            return md.check_finite(c / (1.0 - md.cast(n, "float64"))), None

        return md.scan(body, x, md.arange(steps), "steps")[0]

    lines = told(program, X, check_finite=False)
    assert lines[0] == "check_finite: f64[a=7, b=4] is not finite, step 1 of steps (3)"


def test_check_finite_checks_the_gradient_too():
    def loss(x):
        return md.sum(md.sqrt(md.check_finite(x)))

    lines = told(md.grad(loss), X, check_finite=False)
    assert lines[0] == "check_finite: f64[a=7, b=4] is not finite"
    assert "(backward)" in lines[1]
    assert float(md.jit(loss)(X)) > 0


def test_outside_of_a_trace_a_check_raises_at_once():
    assert np.array_equal(md.check_finite(X), X.data)
    with pytest.raises(FloatingPointError, match="check_finite: f64"):
        md.check_finite(1 / X)


def test_a_check_costs_one_small_all_reduce():
    def program(x):
        for _ in range(3):
            x = md.check_finite(md.sin(x))
        return x

    found = md.jit(program, "x:2,y:2", "a:x; b:y", check_finite=True).lower(X).collectives
    assert [(c.kind, c.payload_bytes) for c in found] == [("all_reduce", 24)]


def test_donated_inputs_are_kept_where_the_jit_checks():
    jitted = md.jit(lambda x: x + 1, donate="x", check_finite=True)
    x = X + 0
    jitted(x)
    assert not x.data.is_deleted()
    lines = told(lambda x: md.check_finite(x / 0), X + 0, check_finite=False, donate="x")
    assert lines == [
        "check_finite: a value is not finite; its inputs were donated, so what made it cannot be "
        "found: leave out `donate` to learn it"
    ]


def test_as_jax_leaves_checks_out():
    (found,) = md.jit(lambda x: md.check_finite(1 / x)).as_jax(X)(X.data)
    assert np.isinf(found).any()


def test_nothing_is_watched_where_nothing_is_asked():
    graph = md.jit(lambda x: md.sin(x)).trace(random([a]))
    assert finite.watched(graph, outputs=False) is None
    watching = finite.watched(graph, outputs=True)
    assert str(watching.graph.outputs[-1]) == "s32[_checks=2]"


def test_prints_are_not_repeated_by_the_search(capsys):
    told(lambda x: (md.print("once"), 1 / x)[1], X)
    assert capsys.readouterr().out == "once\n"
