"""Several runs of a program in one call give what single runs give, one after the other."""

import jax
import numpy as np
import pytest

import meshdsl as md
from meshdsl.lowering.passes.verify import verify

COUNT = 3
batch, embed = md.dims(batch=8, embed=6)


def step(state, x, rate):
    def loss(w):
        return md.mean(md.square(md.einsum(x, w, over="embed") - 1))

    value, gradient = md.value_and_grad(loss)(state["w"])
    return {"state": {"w": state["w"] - rate * gradient}, "loss": value, "x": x * 2}


def numbers(*sizes):
    return np.random.default_rng(0).normal(size=sizes)


STATE = {"w": md.named(numbers(embed.size), [embed])}
XS = numbers(COUNT, batch.size, embed.size)
RATES = np.array([0.1, 0.2, 0.05])


def jitted(backend="numpy", mesh="x:4", layout="batch:x; state/embed:x", **options):
    return md.jit(step, mesh, layout, backend, donate="state", **options)


def together(**options):
    run = jitted(steps_per_call=COUNT, **options)
    return run, (STATE, md.named(XS, ["steps", batch, embed]), md.named(RATES, ["steps"]))


@pytest.mark.parametrize("backend", ["numpy", "jax"])
@pytest.mark.parametrize("mesh, layout", [("x:4", "batch:x; state/embed:x"), ("x:5", "batch:x")])
def test_a_call_of_several_steps_does_what_as_many_calls_do(backend, mesh, layout):
    one, state, losses = jitted(backend, mesh, layout), STATE, []
    for x, rate in zip(XS, RATES, strict=True):
        result = one(state, md.named(x, [batch, embed]), float(rate) * md.named(np.ones(()), []))
        state = result["state"]
        losses.append(float(result["loss"]))
    many, arguments = together(backend=backend, mesh=mesh, layout=layout)
    found = many(*arguments)
    np.testing.assert_allclose(found["loss"], losses, rtol=1e-12)
    np.testing.assert_allclose(found["state"]["w"], state["w"], rtol=1e-12)
    np.testing.assert_allclose(found["x"], 2 * XS, rtol=1e-12)
    assert found["x"].dims.names == ("steps", "batch", "embed")


def test_the_program_is_a_loop_that_sends_as_much_in_every_step():
    many, arguments = together()
    once = jitted().lower(STATE, md.spec([batch, embed], "float64"), md.spec([], "float64"))
    program = many.lower(*arguments)
    verify(program)
    (loop,) = program.block.instructions
    assert loop.op == "scan" and loop.runs == COUNT
    assert program.wire_bytes == pytest.approx(COUNT * once.wire_bytes)
    assert [c.kind for c in program.collectives] == [c.kind for c in once.collectives]


def test_the_graph_is_that_of_one_run():
    many, arguments = together()
    assert all(t.shape.find("steps") is None for t in many.trace(*arguments).inputs)


def test_arguments_without_a_slice_for_every_run_are_reported():
    many, _ = together()
    with pytest.raises(ValueError) as error:
        many(STATE, md.named(XS[0], [batch, embed]), md.named(RATES[:2], ["steps"]))
    assert str(error.value) == (
        "step runs 3 times in a call, so its arguments need a first dim `steps` of that size, "
        "unless they are donated:\n"
        "  x: f64[batch=8, embed=6]\n"
        "  rate: f64[steps=2]"
    )


def test_what_is_donated_must_come_back():
    def lost(state, x):
        return {"loss": md.sum(x) * md.sum(state["w"])}

    run = md.jit(lost, donate="state", steps_per_call=COUNT)
    told = r"cannot run 3 times in one call:\n  `state/w` is donated, but no result has this path"
    with pytest.raises(ValueError, match=told):
        run(STATE, md.named(XS, ["steps", batch, embed]))


def test_a_dim_of_the_program_with_the_same_name_is_reported():
    def stepped(state, x):
        return {"state": state, "y": md.broadcast(x, [md.Dimension("steps", 2), *x.shape])}

    run = md.jit(stepped, donate="state", steps_per_call=COUNT)
    with pytest.raises(ValueError, match="has a dim `steps` of its own; give it another name"):
        run(STATE, md.named(XS, ["steps", batch, embed]))


@pytest.mark.parametrize(
    "options, told",
    [
        ({"steps_per_call": 0}, "steps_per_call must be at least 1, got 0"),
        ({"steps_per_call": 2, "check_finite": True}, "check_finite looks at the arguments of one"),
    ],
)
def test_what_cannot_be_asked_for_is_reported(options, told):
    with pytest.raises(ValueError, match=told):
        md.jit(step, **options)


def test_a_function_for_jax_is_of_one_run():
    many, arguments = together(backend="jax")
    with pytest.raises(ValueError, match="as_jax gives one run of the function"):
        many.as_jax(*arguments)


def test_the_state_is_given_up_as_a_whole():
    many, (_, x, rates) = together(backend="jax")
    state = jax.tree.map(lambda a: a, STATE)
    first = many(state, x, rates)["state"]
    many(first, x, rates)
    assert first["w"].data.is_deleted()
