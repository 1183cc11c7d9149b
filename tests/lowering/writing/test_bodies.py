"""How operations with bodies are lowered: what is moved before them, and what each device runs."""

import jax
import jax.numpy as jnp
import pytest

import meshdsl as md
from tests.ops.agreement import assert_close, random, run

batch, a, b = md.dims(batch=6, a=4, b=3)


def rows(x, w):
    return md.map(lambda x: md.tanh(md.einsum(md.sin(x), w, over="a")), x, "batch")


def gradients(x, w):
    return md.grad(lambda x, w: md.sum(md.square(rows(x, w))), (0, 1))(x, w)


def reference(x, w):
    return jnp.square(jnp.tanh(jnp.sin(x) @ w)).sum()


def lowered(function, mesh, layout):
    x, w = random([batch, a]), random([a, b], seed=1)
    return md.jit(function, mesh, layout, backend="numpy").lower(x, w)


def lengths(program):
    return [i.params["length"] for i in program.block.instructions if i.op == "scan"]


def test_a_map_over_a_split_dim_moves_nothing():
    program = lowered(rows, "x:2,y:2", "batch:x")
    assert program.collectives == ()
    assert lengths(program) == [3]


def test_its_gradient_adds_up_what_every_device_found_once():
    program = lowered(gradients, "x:2", "batch:x")
    (sent,) = program.collectives
    assert (sent.kind, sent.dims.names, sent.count) == ("all_reduce", ("a", "b"), 1)
    assert lengths(program) == [3, 3]


@pytest.mark.parametrize("backend", ["numpy", "jax"])
@pytest.mark.parametrize(
    ("mesh", "layout"),
    [("x:3,y:2", "batch:x; a:y"), ("x:4,y:2", "batch:x; b:y"), ("x:2,y:2", "batch:y+x"),
     ("x:2", "batch:x; a:x?")],
)  # fmt: skip
def test_pads_and_busy_axes_change_no_number(mesh, layout, backend):
    x, w = random([batch, a]), random([a, b], seed=1)
    found = run(gradients, x, w, mesh=mesh, layout=layout, backend=backend)
    for mine, want in zip(found, jax.grad(reference, (0, 1))(x.data, w.data), strict=True):
        assert_close(mine, want)


def test_what_depends_on_its_own_past_or_decides_runs_whole():
    def running(x, w):
        return md.scan(lambda c, x: (c + x, c), md.zeros([a], x.dtype), x, "batch")[1]

    def doubled(x, w):
        return md.scan(lambda c, x: (c + c, None), md.sum(x, "batch"), x, "batch")[0]

    def deciding(x, w):
        return md.map(lambda x: md.cond(md.sum(x) > 0, lambda: x, lambda: -x), x, "batch")

    x, w = random([batch, a]), random([a, b], seed=1)
    for function in (running, doubled, deciding):
        assert lengths(lowered(function, "x:2", "batch:x")) == [6]
        expected = run(function, x, w)
        assert_close(run(function, x, w, mesh="x:2", layout="batch:x"), expected)


def test_what_two_bodies_capture_is_fetched_once_in_each_layout():
    def model(x, w):
        both = md.cond(
            md.sum(x) > 0,
            lambda: md.einsum(x, w, over="a"),
            lambda: md.sin(md.einsum(x, w, over="a")),
        )
        return both + md.einsum(x, w, over="a")

    program = lowered(model, "x:2", "b:x; a:x?; batch:-")
    gathered = [c for c in program.collectives if c.kind == "all_gather"]
    assert [c.dims.names for c in gathered].count(("batch", "a")) == 1


def test_a_tensor_from_nothing_is_made_where_it_is_read():
    def model(x, w):
        ramp = md.cast(md.arange(a), "float64")
        return md.cond(
            md.sum(x) > 0,
            lambda: x * ramp,
            lambda: md.einsum(ramp, md.sum(w, "b"), x, out=[batch, a]),
        )

    program = lowered(model, "x:2,y:2", "a:x; b:y")
    assert "all_gather" not in [c.kind for c in program.collectives]
    x, w = random([batch, a]), random([a, b], seed=1)
    assert_close(run(model, x, w, mesh="x:2,y:2", layout="a:x; b:y"), run(model, x, w))
