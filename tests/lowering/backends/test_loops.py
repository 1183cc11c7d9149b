"""Loops of the jax backend: stacks that begin uninitialised, or are written to in place."""

import jax
import numpy as np
import pytest

import meshdsl as md
from meshdsl.lowering.backends.jax.emitters import EMITTERS
from meshdsl.lowering.backends.jax.machine import Machine
from meshdsl.lowering.options import Options

CACHE = ["steps", "batch", "slots"]
STEPS, WIDTH = md.dims(steps=5, width=3)
X = np.random.default_rng(0).standard_normal((5, 3)).astype("float32")


def running_sums(x, reverse):
    def add(total, row):
        total = total + row
        return total, (total, md.square(row))

    return md.scan(add, md.zeros([WIDTH]), x, dim="steps", reverse=reverse)


def emitted(program, unfilled=False, in_place=False):
    def run(*arrays):
        how = {"unfilled": unfilled, "in_place": in_place}
        machine = Machine(program.mesh, EMITTERS, torus=True, **how)
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


def overwritten(caches, fresh, start, reverse=False, again=False):
    """Writes a piece into the slice of each iteration, and reads all of it."""

    def step(total, layer):
        cache, piece, counts = layer
        written = md.dynamic_update_slice(cache, piece, "slots", start)
        total = total + md.sum(written * counts, "slots")
        return total, (md.square(counts), md.sum(cache, "slots") if again else total, written)

    batch = caches.shape.get("batch")
    zero = md.zeros([batch], "float32")
    stacks = (caches, fresh, md.ones([STEPS, batch]) * 2)
    return md.scan(step, zero, stacks, dim="steps", reverse=reverse)


def written_caches(order):
    rng = np.random.default_rng(2)
    sizes = {"steps": 5, "batch": 2, "slots": 7}
    caches = rng.standard_normal([sizes[name] for name in order]).astype("float32")
    fresh = rng.standard_normal((5, 2, 3)).astype("float32")
    return md.named(caches, order), md.named(fresh, ["steps", "batch", "slots"])


@pytest.mark.long
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("order", [["steps", "batch", "slots"], ["slots", "steps", "batch"]])
@pytest.mark.parametrize("start", [0, 2, 4, 9])  # a piece that would exceed begins earlier
def test_a_stack_that_is_written_to_where_it_is_has_the_same_numbers(order, start, reverse):
    caches, fresh = written_caches(order)
    f = md.jit(lambda caches, fresh, start: overwritten(caches, fresh, start, reverse))
    program = f.lower(caches, fresh, md.named(np.int32(start), []))
    arrays = caches.data, fresh.data, np.int32(start)
    usual = jax.jit(emitted(program, in_place=False))(*arrays)
    in_place = jax.jit(emitted(program, in_place=True))(*arrays)
    for one, other in zip(usual, in_place, strict=True):
        np.testing.assert_array_equal(one, other)
    want = np.asarray(caches).transpose([order.index(name) for name in CACHE]).copy()
    want[..., min(start, 4) : min(start, 4) + 3] = np.asarray(fresh)
    names = program.block.outputs[-1].shape.names
    np.testing.assert_array_equal(in_place[-1], want.transpose([CACHE.index(n) for n in names]))


def scattered_into(caches, fresh, places, reverse=False):
    """Writes rows to places of the slice of each iteration, and reads all of it."""

    def step(total, layer):
        cache, rows = layer
        written = md.scatter(cache, places, rows, "slots", unique=True)
        return total + md.sum(written, "slots"), written

    zero = md.zeros([caches.shape.get("batch")], "float32")
    return md.scan(step, zero, (caches, fresh), dim="steps", reverse=reverse)


@pytest.mark.parametrize("order", [["steps", "batch", "slots"], ["slots", "steps", "batch"]])
@pytest.mark.parametrize("reverse", [False, True])
def test_unique_updates_are_written_to_a_stack_where_it_is(order, reverse):
    caches, fresh = written_caches(order)
    fresh = md.named(np.asarray(fresh), ["steps", "batch", "rows"])
    places = np.array([6, -1, 2], np.int32)
    f = md.jit(lambda *given: scattered_into(*given, reverse))
    program = f.lower(caches, fresh, md.named(places, ["rows"]))
    arrays = caches.data, fresh.data, places
    in_place = jax.jit(emitted(program, in_place=True))(*arrays)
    for one, other in zip(jax.jit(emitted(program))(*arrays), in_place, strict=True):
        np.testing.assert_array_equal(one, other)
    want = np.asarray(caches).transpose([order.index(name) for name in CACHE]).copy()
    want[..., [6, 2]] = np.asarray(fresh)[..., [0, 2]]
    names = program.block.outputs[-1].shape.names
    np.testing.assert_array_equal(in_place[-1], want.transpose([CACHE.index(n) for n in names]))
    assert stacked_results(emitted(program, in_place=True), arrays) == []


def stacked_results(run, arrays):
    """Returns the shapes of the stacks that the only loop of a function makes anew."""
    (scan,) = [e for e in jax.make_jaxpr(run)(*arrays).eqns if e.primitive.name == "scan"]
    return [value.aval.shape for value in scan.outvars[scan.params["num_carry"] :]]


def test_a_slice_of_a_stack_is_not_copied_for_a_part_of_it():
    caches, fresh = written_caches(CACHE)
    f = md.jit(overwritten)
    given = (caches, fresh, md.named(np.int32(1), []))
    arrays = caches.data, fresh.data, np.int32(1)
    program = f.lower(*given)
    others = [(5, 2), (5, 2)]
    assert sorted(stacked_results(emitted(program, in_place=True), arrays)) == others
    assert sorted(stacked_results(emitted(program), arrays)) == [*others, (5, 2, 7)]
    # What callers may differentiate has stacks of its own.
    assert (5, 2, 7) in stacked_results(f.as_jax(*given), arrays)
    # Who reads what was there before needs a copy.
    program = md.jit(lambda *given: overwritten(*given, again=True)).lower(*given)
    assert (5, 2, 7) in stacked_results(emitted(program, in_place=True), arrays)


def test_a_compiled_loop_writes_to_the_stack_that_is_given_to_it():
    """The program needs no memory for a second stack, nor for a slice."""
    steps, batch, slots = md.dims(steps=4, batch=2, slots=4096)
    caches = md.spec([steps, batch, slots], "float32")
    fresh = md.spec([steps, batch, md.Dimension("slots", 1)], "float32")

    def write(caches, fresh, start):
        return {"caches": overwritten_only(caches, fresh, start)}

    compiled = md.jit(write, donate="caches").lower(caches, fresh, md.spec([], "int32")).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 4 * 4096


def overwritten_only(caches, fresh, start):
    def step(carry, layer):
        return carry, md.dynamic_update_slice(*layer, "slots", start)

    return md.scan(step, md.zeros([]), (caches, fresh), dim="steps")[1]
