"""Where a gradient is stopped: an input that has no differentiable path to the value is told."""

import jax.numpy as jnp
import numpy as np
import pytest

import meshdsl as md
from meshdsl.reports.explain.explanation import explain
from tests.ops.agreement import assert_agree, assert_close, message, random, run

steps, a = md.dims(steps=3, a=4)
NO_PATH = "gradient: there is no differentiable path: "


def as_float(x):
    return md.cast(x, "float64")


STOPPED = {
    "round": lambda x: md.sum(md.round(x)),
    "greater": lambda x: md.sum(as_float(x > 0)),
    "cast": lambda x: md.sum(as_float(md.cast(x, "int32"))),
    "sign": lambda x: md.sum(md.sin(md.sign(x) * 2.0)),
    "floor": lambda x: md.scan(
        lambda c, _: (c + md.sum(md.floor(x)), None), md.zeros([], x.dtype), None, steps
    )[0],
    "ceil": lambda x: md.sum(md.checkpoint(md.ceil)(x)),
    "less": lambda x: md.cond(md.sum(x) < 1, lambda: 1.0, lambda: 2.0),
}


@pytest.mark.parametrize("name", STOPPED)
def test_the_operation_that_stops_the_gradient_is_named_with_its_line(name):
    text = message(md.grad(STOPPED[name]), random([a]))
    place = "at tests/gradients/test_stops.py:"
    told = f"{NO_PATH}x (f64[a=4]) reaches the value only through {name} {place}"
    assert told in text
    line = int(text.partition(told)[2].split()[0])
    first = STOPPED[name].__code__.co_firstlineno
    assert first <= line < first + (4 if name == "floor" else 1)
    assert "md.stop_gradient(...) marks a constant, md.custom_gradient gives a slope" in text


def test_a_loop_that_only_counts_is_named_itself():
    def loss(x):
        turns = md.while_loop(
            lambda s: md.sum(s[0]) > 0.1,
            lambda s: (s[0] / 2, s[1] + 1),
            (x, md.full([], 0, "int32")),
        )[1]
        return as_float(turns)

    assert "reaches the value only through while_loop at tests/gradients/test_stops.py:" in message(
        md.grad(loss), random([a])
    )


def test_every_input_without_a_path_is_told_by_its_own():
    def loss(params, x):
        return md.sum(md.round(params["layer"][0]) * x) + md.sum(as_float(params["scale"] > 0) * x)

    params = {"layer": [random([a])], "scale": random([]), "unused": random([a])}
    text = message(md.grad(loss, (0, 1)), params, random([a]))
    assert "params/layer/0 (f64[a=4]) reaches the value only through round at " in text
    assert "; params/scale (f64[]) reaches the value only through greater at " in text
    assert "unused" not in text


def test_a_differentiable_path_beside_it_is_followed():
    def ours(x):
        return md.where(x > 0, x, 0) * (1 + md.round(x)) + md.sum(md.sign(x))

    def theirs(x):
        return jnp.where(x > 0, x, 0) * (1 + jnp.round(x)) + jnp.sign(x).sum()

    assert_agree(ours, theirs, random([a], -2, 2), order=2)


def test_what_is_meant_as_a_constant_has_zeros():
    for loss in (
        lambda x: md.sum(md.stop_gradient(x)),
        lambda x: md.sum(md.stop_gradient(md.round(x))),
        lambda x: md.sum(md.round(md.stop_gradient(x))),
        lambda x: md.sum(md.ones([a], "float64")),
    ):
        assert_close(run(md.grad(loss), random([a])), np.zeros(4))


def test_an_unneeded_result_of_a_loop_is_no_path():
    def loss(x, y):
        end, kept = md.scan(lambda c, _: (c * y, md.round(x)), y, None, steps)
        return md.sum(end), kept

    def gradients(x, y):
        return md.grad(loss, (0, 1), has_aux=True)(x, y)[0]

    by_x, _ = run(gradients, random([a]), random([a], seed=1))
    assert_close(by_x, np.zeros(4))


def test_the_slope_of_a_slope_that_jumps_is_zero():
    def slope(x):
        return md.grad(lambda x: md.sum(md.relu(x) + md.abs(x) + md.maximum(x, 0.5)))(x)

    again = md.grad(lambda x: md.sum(slope(x)))
    assert_close(run(again, random([a], -1, 1)), np.zeros(4))


def test_a_gradient_that_is_rounded_is_told():
    def loss(x):
        return md.sum(md.round(md.grad(lambda x: md.sum(x * x * x))(x)))

    text = message(md.grad(loss), random([a]))
    assert (
        "x (f64[a=4]) reaches the value only through round at tests/gradients/test_stops.py:"
        in text
    )


CHOICES = {
    "top_k": lambda s: md.top_k(s, 2, "a", "choice")[1],
    "sort": lambda s: md.argsort(s, "a"),
    "argmax": lambda s: md.argmax(s, "a"),
    "argmin": lambda s: md.argmin(s, "a"),
}


@pytest.mark.parametrize("backend", ["jax", "jax_auto"])
@pytest.mark.parametrize("name", CHOICES)
def test_what_only_chooses_elements_has_zeros_and_a_note(name, backend):
    def step(params, x):
        def loss(params, x):
            chosen = md.take(x * params["w"], CHOICES[name](params["scores"]), "a")
            return md.sum(md.sin(chosen))

        return md.scan(lambda c, x: (c, md.grad(loss)(params, x)), (), x, steps)[1]

    params = {"scores": random([a]), "w": random([a], seed=1)}
    x = random([steps, a], seed=2)
    function = md.jit(step, "data:2", "a:data", backend)
    found = function(params, x)
    assert not np.asarray(found["scores"]).any()
    assert np.asarray(found["w"]).any()
    program = function.lower(params, x)
    line = CHOICES[name].__code__.co_firstlineno
    note = (
        "note: params/scores (f64[a=4]) decides only which elements are chosen, by "
        f"{name} at tests/gradients/test_stops.py:{line}: its gradient is zero"
    )
    for report in (str(program), str(explain(program))):
        assert " ".join(report.split()).count(note) == 1


@pytest.mark.parametrize("first", [0, 1])
def test_a_jump_beside_a_choice_by_the_same_input_is_an_error_in_any_order(first):
    def loss(x, values):
        def jump():
            return md.sum(md.floor(x))

        def choice():
            return md.sum(md.take(values, md.top_k(x, 2, "a", "choice")[1], "a"))

        terms = [term() for term in ((jump, choice), (choice, jump))[first]]
        return terms[0] + terms[1]

    text = message(md.grad(loss), random([a]), random([a], seed=1))
    assert (
        "x (f64[a=4]) reaches the value only through floor at tests/gradients/test_stops.py:"
        in text
    )
    assert ", top_k at tests/gradients/test_stops.py:" in text


def test_all_choices_by_one_input_are_in_its_note():
    def loss(x, values):
        best = md.take(values, md.argmax(x, "a"), "a")
        return md.sum(best) + md.sum(md.take(values, md.argmin(x, "a"), "a"))

    function = md.jit(md.grad(loss))
    given = random([a]), random([a], seed=1)
    assert not np.asarray(function(*given)).any()
    text = " ".join(str(function.lower(*given)).split())
    assert "which elements are chosen, by argmax at tests/gradients/test_stops.py:" in text
    assert ", argmin at tests/gradients/test_stops.py:" in text


def test_a_choice_beside_a_jump_is_no_excuse():
    def loss(params):
        place = md.argmax(params["scores"], "a")
        return md.sum(md.round(params["w"]) * md.cast(place, "float64"))

    text = message(md.grad(loss), {"scores": random([a]), "w": random([a])})
    assert "params/w (f64[a=4]) reaches the value only through round at" in text
    assert "scores" not in text
