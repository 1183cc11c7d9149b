"""Loops of the jax backend whose stacks of results begin uninitialised, as on TPUs."""

import jax
import numpy as np
import pytest

import meshdsl as md
from meshdsl.lowering.backends.jax.emitters import EMITTERS
from meshdsl.lowering.backends.jax.machine import Machine
from meshdsl.lowering.options import Options

STEPS, WIDTH = md.dims(steps=5, width=3)
X = np.random.default_rng(0).standard_normal((5, 3)).astype("float32")


def running_sums(x, reverse):
    def add(total, row):
        total = total + row
        return total, (total, md.square(row))

    return md.scan(add, md.zeros([WIDTH]), x, dim="steps", reverse=reverse)


def emitted(program, unfilled):
    def run(*arrays):
        machine = Machine(program.mesh, EMITTERS, torus=True, unfilled=unfilled)
        return machine.run(program.block, arrays)

    return run


@pytest.mark.parametrize("reverse", [False, True])
def test_an_uninitialised_stack_has_the_results_of_every_iteration(reverse):
    f = md.jit(lambda x: running_sums(x, reverse))
    program = f.lower(md.named(X, [STEPS, WIDTH]))
    order = X[::-1] if reverse else X
    sums = np.cumsum(order, axis=0, dtype="float64")
    total, stack, squares = jax.jit(emitted(program, unfilled=True))(X)
    np.testing.assert_allclose(total, sums[-1], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(stack, sums[::-1] if reverse else sums, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(squares, X * X)


def test_only_compiled_programs_of_tpus_have_uninitialised_stacks():
    f = md.jit(lambda x: running_sums(x, False))
    program = f.lower(md.named(X, [STEPS, WIDTH]))
    assert " empty[" in str(jax.make_jaxpr(emitted(program, unfilled=True))(X))
    assert " empty[" not in str(jax.make_jaxpr(emitted(program, unfilled=False))(X))
    as_jax = f.as_jax(md.named(X, [STEPS, WIDTH]))
    assert " empty[" not in str(jax.make_jaxpr(as_jax)(X))


def test_slices_that_are_read_ahead_are_those_of_the_next_iteration():
    batch, width = md.dims(batch=2, width=4)

    def layer(x, w):
        y = md.tanh(md.einsum(x, w, out=[batch, "out"])).rename(out="width")
        return y, md.sum(y, "width")

    f = md.jit(
        lambda x, w: md.scan(layer, x, w, dim="steps"),
        "data:2",
        "batch:data; w/width:data",
        options=Options(prefetch=True),
    )
    rng = np.random.default_rng(1)
    x, w = rng.standard_normal((2, 4)), rng.standard_normal((5, 4, 4))
    x, w = x.astype("float32"), w.astype("float32")
    program = f.lower(
        md.named(x, [batch, width]), md.named(w, [STEPS, width, md.Dimension("out", 4)])
    )
    (scan,) = [i for i in program.block.instructions if i.op == "scan"]
    assert scan.params["ahead"]
    run = jax.shard_map(
        emitted(program, unfilled=True),
        mesh=jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,)),
        in_specs=(jax.P("data"), jax.P(None, "data")),
        out_specs=[jax.P("data"), jax.P(None, "data")],
        check_vma=False,
    )
    carry, sums = jax.jit(run)(x, w)
    want = x.astype("float64")
    for step in range(5):
        want = np.tanh(want @ w[step])
        np.testing.assert_allclose(sums[step], want.sum(1), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(carry, want, rtol=1e-4, atol=1e-5)
