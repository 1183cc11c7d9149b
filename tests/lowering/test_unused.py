"""Warnings of what a layout does in vain, by any program that is lowered with it."""

import warnings

import jax
import pytest

import meshdsl as md
from meshdsl import optim
from meshdsl.layouts.validate import LayoutWarning, ScopeWarning
from meshdsl.lowering.graphs.simplify import simplify
from meshdsl.lowering.options import Options
from meshdsl.lowering.unused import OptionWarning, paths_of

x, y, z = md.dims(x=8, y=8, z=8)


def products(params, data):
    return md.einsum(params["w"], md.einsum(params["v"], data, over="y"), over="z")


ARGUMENTS = {"w": md.spec([x, z]), "v": md.spec([y, z])}, md.spec([x, y])


def warned(function, arguments, layout):
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        md.jit(function, "m:2", layout, "numpy").lower(*arguments)
    return [(each.category, str(each.message)) for each in told]


def test_an_optional_rule_without_effect_is_reported_with_the_line_of_the_call():
    with pytest.warns(LayoutWarning) as told:
        md.jit(lambda data: data * 2, "m:2", "x:m; y:m?").lower(md.spec([x, y]))
    assert str(told[0].message).startswith(
        "`y:m?` takes no axis anywhere: wherever it would, `x:m`"
    )
    assert told[0].filename == __file__


def test_a_rule_that_takes_its_axis_in_one_tensor_is_not_reported():
    assert warned(products, ARGUMENTS, "x:m; z:m?") == []
    assert len(warned(products, ARGUMENTS, "x:m; y:m?; z:m?")) == 1  # but `z` comes too late


def test_what_is_made_of_nothing_is_no_tensor_that_takes_an_axis():
    def function(data):
        return data + md.cast(md.arange(y) * 2, "float32")

    assert len(warned(function, [md.spec([x, y])], "x:m; y:m?")) == 1


def test_what_is_inside_of_loops_counts():
    def function(data):
        return md.map(lambda row: row * 2, data, "x")

    assert warned(function, [md.spec([x, y])], "x:m; y:m?") == []


def test_a_misspelt_scope_is_reported_by_any_program():
    ((category, text),) = warned(products, ARGUMENTS, "param/x:m; other/x:m; data/y:m")
    assert category is ScopeWarning
    assert text == "`param/x:m` fits no path of this program. Did you mean `params/x:m`?"


def test_where_every_scope_applies_it_is_not_asked_what_a_step_renews(monkeypatch):
    asked = []
    monkeypatch.setattr("meshdsl.lowering.unused.returned_anew", lambda graph: asked.append(1))
    assert not warned(products, ARGUMENTS, "params/z:m")
    assert not asked


def test_a_program_that_makes_a_state_may_lack_what_a_layout_is_for():
    def init(key):
        return {"params": md.random.normal(key, [x, y])}

    assert warned(init, [md.random.key(0)], "x:m; y:m?; param/x:m") == []


def test_once_is_enough():
    def lowered():
        md.jit(lambda data: data * 2, "m:2", "x:m; y:m?").lower(md.spec([x, y]))

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("default")
        for _ in range(3):
            lowered()
    assert len(told) == 1


def test_a_limit_that_nothing_keeps_is_reported_with_what_is_needed():
    arguments = [md.spec([x, y])]
    doubled = md.jit(lambda data: data * 2, "m:2", "x:m", options=Options(memory=10))
    with pytest.warns(OptionWarning) as told:
        needed = doubled.lower(*arguments).peak_bytes
    assert str(told[0].message) == (
        f"memory=10 B is less than the program needs however it is lowered: at least {needed} B. "
        "Recompute activations instead of keeping them (--remat=full, md.checkpoint), compute the "
        "batch in parts (--microbatches), split more dims, or allow more memory"
    )
    assert told[0].filename == __file__
    enough = md.jit(lambda data: data * 2, "m:2", "x:m", options=Options(memory=needed))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        enough.lower(*arguments)


def test_rules_for_gradients_that_conflict_are_reported_with_the_gradient():
    def function(params, data):
        return md.grad(lambda params: md.sum(md.tanh(params["w"] * data)))(params)["w"] * 2

    arguments = {"w": md.spec([x, y])}, md.spec([x, y])
    with pytest.raises(ValueError) as error:
        md.jit(function, "m:2", "gradients/x:m; gradients/y:m").lower(*arguments)
    lines = str(error.value).splitlines()
    assert lines[2] == "  1. `gradients/x:m` and `gradients/y:m` both claim mesh axis `m` in"
    assert lines[3].startswith("       gradients/params/w: [x=8, y=8]      ")
    with pytest.raises(ValueError) as error:
        md.jit(function, "m:2", "*/params/w/x:m; gradient?/params/w/x:-").lower(*arguments)
    assert "`*/params/w/x:m` and `gradient?/params/w/x:-` contradict" in str(error.value)
    assert "\n       gradients/params/w\n" in str(error.value)


def test_the_paths_of_a_program_are_those_of_its_ends_and_of_what_is_named():
    def function(params, data):
        def loss(params):
            h = md.name(md.tanh(data * params["w"]), "hidden")
            return md.sum(md.checkpoint(lambda h: md.name(h * h, "squares"))(h))

        return {"found": md.grad(loss)(params)["w"] * 2}

    graph = md.jit(function).trace({"w": md.spec([x])}, md.spec([x]))
    assert set(paths_of(simplify(graph))) == {
        "params/w",
        "data",
        "found",
        "hidden",
        "squares",
        "gradients/params/w",
    }


MESH = "m:2,n:2"
WEIGHTS = {"w": md.spec([x, z]), "v": md.spec([z])}
DATA = md.spec([y, x])


def loss(params, data):
    return md.mean(md.einsum(data, params["w"], over="x") * params["v"])


def warned_on(function, arguments, layout):
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        md.jit(function, MESH, layout, "numpy").lower(*arguments)
    assert all(each.category is ScopeWarning and each.filename == __file__ for each in told)
    return [str(each.message) for each in told]


def stepping(optimizer):
    def step(params, state, number, data):
        value, grads = md.value_and_grad(loss)(params, data)
        params, state = optimizer.update(grads, state, params, number)
        return value, params, state

    state = jax.tree.map(
        lambda leaf: md.spec(leaf.dims, "float32"),
        md.jit(optimizer.init)({name: md.zeros(each.dims) for name, each in WEIGHTS.items()}),
        is_leaf=lambda leaf: isinstance(leaf, md.Tensor),
    )
    return step, (WEIGHTS, state, md.spec([], "int32"), DATA)


def test_rules_for_params_are_reported_where_the_argument_has_another_name():
    def forward(weights, data):
        return loss(weights, data)

    expected = [
        "`params/x:m` fits no path of this program: `forward` has the arguments `weights` and "
        "`data`. Did you mean `weights/x:m`?"
    ]
    assert warned_on(forward, (WEIGHTS, DATA), "y:m; params/x:m") == expected
    assert warned_on(forward, (WEIGHTS, DATA), "y:m; weights/x:m") == []
    # What no argument could follow, and what names no parameters, may be for another program.
    assert warned_on(lambda data: data * 2, (DATA,), "y:m; params/x:m") == []
    assert warned_on(forward, (WEIGHTS, DATA), "y:m; optimizer/x:m") == []


@pytest.mark.parametrize("optimizer", [optim.Lion(0.1), optim.AdamW(0.1)])
def test_every_scope_that_fits_nothing_in_a_training_step_is_reported(optimizer):
    step, arguments = stepping(optimizer)
    assert warned_on(step, arguments, "y:m; state/x:m") == []
    (text,) = warned_on(step, arguments, "y:m; optimizer/x:m")
    assert text == (
        "`optimizer/x:m` fits no path of this program: `step` has the arguments `params`, `state`, "
        "`number` and `data`. Did you mean `params/x:m` or `state/x:m`?"
    )
    (text,) = warned_on(step, arguments, "y:m; head/z:m")
    assert "Did you mean `params/z:m` or `state/z:m`?" in text


@pytest.mark.parametrize("optimizer", [optim.Lion(0.1), optim.AdamW(0.1), optim.Ema(optim.Lion(1))])
def test_programs_of_a_job_share_its_layout_without_warnings(optimizer):
    layout = "y:m; state/x:m; params/x:m"
    step, arguments = stepping(optimizer)
    assert warned_on(optimizer.init, arguments[:1], layout) == []
    assert warned_on(md.value_and_grad(loss), (WEIGHTS, DATA), layout) == []
    assert warned_on(loss, (WEIGHTS, DATA), layout) == []
    assert warned_on(step, arguments, layout) == []


def test_a_state_made_with_the_layout_of_the_step_is_where_the_step_wants_it():
    optimizer = optim.AdamW(0.1)
    step, arguments = stepping(optimizer)
    layout = "y:m; state/x:m; params/x:m"
    wanted = md.jit(step, MESH, layout, "numpy").lower(*arguments)
    made = md.jit(lambda params: {"state": optimizer.init(params)}, MESH, layout, "numpy")
    program = made.lower(WEIGHTS)
    places = dict(zip(wanted.input_paths, wanted.block.inputs, strict=True))
    for path, value in zip(program.output_paths, program.block.outputs, strict=True):
        assert value.layout == places[path].layout, path
    assert len(program.output_paths) == 4


def test_a_misspelt_dim_is_refused_where_a_state_is_made_and_unknown_ones_elsewhere():
    optimizer = optim.AdamW(0.1)
    with pytest.raises(ValueError, match="Did you mean `tokens`"):
        params = {"w": md.spec(md.dims(tokens=4))}
        md.jit(optimizer.init, MESH, "tokns:m", "numpy").lower(params)
    with pytest.raises(ValueError, match="`other:m` names a dim that this program does not have"):
        md.jit(lambda data: data * 2, MESH, "other:m", "numpy").lower(DATA)
    with pytest.raises(ValueError, match="`other:m` names a dim that this program does not have"):
        md.jit(lambda data: data, MESH, "other:m", "numpy").lower(DATA)


def test_rules_for_params_are_not_meant_for_an_argument_that_is_no_tree():
    assert warned_on(lambda logits: md.softmax(logits, "x"), (DATA,), "y:m; params/x:n") == []

    def scored(logits, batch):
        return md.mean(logits * batch["weight"])

    batch = {"weight": md.spec([y])}
    assert warned_on(scored, (DATA, batch), "y:m; params/x:n") == []
    (text,) = warned_on(scored, (DATA, batch), "params/y:m")
    assert text.endswith("Did you mean `batch/y:m`?")


def accumulated(params, total, statistics, data):
    value, grads = md.value_and_grad(loss)(params, data)
    mean = 0.9 * statistics["mean"] + 0.1 * md.mean(data, "y")
    return value, grads, jax.tree.map(lambda a, b: a + b, total, grads), {"mean": mean}


def scaled(params, statistics, data):
    value, grads = md.value_and_grad(loss)(params, data)
    mean = 0.9 * statistics["mean"] + 0.1 * md.mean(data, "y")
    return value, {name: 0.5 * grad for name, grad in grads.items()}, {"mean": mean}


def with_statistics(params, statistics, data):
    value, grads = md.value_and_grad(loss)(params, data)
    return value, grads, {"mean": 0.9 * statistics["mean"] + 0.1 * md.mean(data, "y")}


STATISTICS = {"mean": md.spec([x])}


@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        (with_statistics, (WEIGHTS, STATISTICS, DATA)),
        (scaled, (WEIGHTS, STATISTICS, DATA)),
        (accumulated, (WEIGHTS, WEIGHTS, STATISTICS, DATA)),
    ],
)
def test_a_program_that_returns_gradients_and_statistics_is_no_training_step(function, arguments):
    assert warned_on(function, arguments, "y:m; optimizer/x:n") == []


def summed(params, data):
    def part(total, row):
        grads = md.grad(loss)(params, row)
        return {name: total[name] + grads[name] for name in total}, None

    zeros = {name: md.zeros(each.dims) for name, each in WEIGHTS.items()}
    return md.scan(part, zeros, data, dim="part")[0]


def of_parts(params, state, data):
    total = summed(params, data)
    state = {name: 0.9 * state[name] + total[name] for name in state}
    return {"params": {name: params[name] - 0.1 * state[name] for name in params}, "state": state}


def without_state(params, data):
    total = summed(params, data)
    return {name: params[name] - 0.1 * total[name] for name in params}


def in_a_loop(params, data):
    def step(params, row):
        grads = md.grad(loss)(params, row)
        return {name: params[name] - 0.1 * grads[name] for name in params}, None

    return md.scan(step, params, data, dim="part")[0]


PARTS = md.spec([md.Dimension("part", 2), y, x])


def test_steps_that_accumulate_gradients_or_have_no_state_are_training_steps():
    (text,) = warned_on(of_parts, (WEIGHTS, WEIGHTS, PARTS), "y:m; optimizer/x:n")
    assert text.endswith("Did you mean `params/x:n` or `state/x:n`?")  # `data` is not returned
    for step in (without_state, in_a_loop):
        (text,) = warned_on(step, (WEIGHTS, PARTS), "y:m; head/x:n")
        assert text.endswith("Did you mean `params/x:n`?")
        assert warned_on(step, (WEIGHTS, PARTS), "y:m; gradients/x:n") == []
    assert warned_on(summed, (WEIGHTS, PARTS), "y:m; head/x:n") == []


def test_a_step_is_not_warned_of_rules_that_nothing_in_it_could_follow():
    def discriminate(judge, momenta, data):
        grads = md.grad(loss)(judge, data)
        momenta = {name: 0.9 * momenta[name] + grads[name] for name in momenta}
        judge = {name: judge[name] - 0.1 * momenta[name] for name in judge}
        return {"judge": judge, "momenta": momenta}

    shared = "y:m; judge/x:n; momenta/x:n; painter/x:n; trace/x:n"
    arguments = WEIGHTS, WEIGHTS, DATA
    assert warned_on(discriminate, arguments, shared) == []
    assert warned_on(discriminate, arguments, f"{shared}; trace/other/z:n") == []
    (text,) = warned_on(discriminate, arguments, f"{shared}; judge/other/z:n")
    assert "The nearest paths: `judge/" in text
    (text,) = warned_on(discriminate, arguments, "y:m; judge/x:n; trace/x:n")
    assert text.endswith("Did you mean `momenta/x:n`?")
