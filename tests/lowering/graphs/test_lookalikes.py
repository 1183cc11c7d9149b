"""Notes on trees that look like an argument, but follow other rules of the layout."""

import warnings

import jax
import pytest

import meshdsl as md
from meshdsl.layouts.validate import ScopeWarning
from meshdsl.lowering.graphs import lookalikes as module
from meshdsl.reports.explain.explanation import explain

embed, d_ff = md.dims(embed=8, d_ff=16)
TREE = {"w": md.spec([embed, d_ff]), "v": md.spec([d_ff, embed])}


def notes(function, layout, *args, backend="jax"):
    program = md.jit(function, "data:8", layout, backend).lower(*args)
    found = list(program.notes)
    for note in found:
        text, report = " ".join(str(program).split()), " ".join(str(explain(program)).split())
        assert f"note: {note}" in text
        assert f"note: {note}" in report
    return found


def double(tree):
    return jax.tree.map(lambda x: 2.0 * x, tree)


@pytest.mark.parametrize("backend", ["jax", "jax_auto"])
def test_a_state_that_mirrors_what_is_not_called_params_is_noted(backend):
    def step(weights, mean):
        return {"weights": double(weights), "mean": double(mean)}

    assert notes(step, "weights/embed:data", TREE, TREE, backend=backend) == [
        "`mean/v` and 1 more have the structure and dims of `weights`, but not the layout: "
        "`weights/embed:data` does not apply. Add a rule such as `mean/embed:data`, or call the "
        "parameters `params`: what mirrors these follows their rules"
    ]
    assert notes(step, "weights/embed:data; mean/embed:-", TREE, TREE, backend=backend) == []


@pytest.mark.parametrize(
    "layout", ["optimizer/embed:data", "optimizer/embed:data; gradients/embed:data"]
)
def test_parameters_need_not_follow_the_rules_of_zero_1_and_zero_2(layout):
    def step(state):
        gradients = md.grad(lambda params: md.sum(params["w"]) ** 2 + md.sum(params["v"]))(
            state["params"]
        )
        mean = jax.tree.map(lambda m, g: 0.9 * m + g, state["optimizer"]["mean"], gradients)
        params = jax.tree.map(lambda p, m: p - m, state["params"], mean)
        return {"params": params, "optimizer": {"mean": mean}}

    state = {"params": TREE, "optimizer": {"mean": TREE}}
    assert notes(step, layout, state) == []
    part = {"params": TREE, "optimizer": {"mean": TREE, "few": {"w": TREE["w"]}}}
    assert notes(lambda state: double(state), layout, part) == []


def test_a_state_that_is_not_the_parameters_is_noted_if_it_misses_a_rule_of_the_optimizer():
    def step(optimizer, average):
        return double(optimizer), double(average)

    note = notes(step, "optimizer/embed:data", TREE, TREE)[0]
    assert "`optimizer/embed:data` does not apply. Add a rule such as `average/" in note


def test_parameters_of_any_place_are_not_noted_where_the_state_is_returned_by_its_name():
    def step(params, optimizer):
        mean = jax.tree.map(lambda m, p: 0.9 * m + p, optimizer["mean"], params)
        return 1.0, jax.tree.map(lambda p, m: p - m, params, mean), {"mean": mean}

    assert notes(step, "optimizer/embed:data", TREE, {"mean": TREE}) == []

    def named(optimizer, average):
        return {"optimizer": double(optimizer), "average": double(average)}

    note = notes(named, "optimizer/embed:data", TREE, TREE)[0]
    assert "Add a rule such as `average/" in note


def test_results_that_two_arguments_are_like_are_noted_if_those_differ():
    def step(params, mean):
        return double(mean), double(params)

    alike = "params/embed:data"
    assert notes(step, alike, TREE, TREE) == []
    found = notes(step, f"{alike}; mean/params/embed:-", TREE, TREE)
    assert [note.partition(", but")[0] for note in found] == [
        "`0/params/v` and 1 more have the structure and dims of `mean`",
        "`1/params/v` and 1 more have the structure and dims of `mean`",
    ]
    assert found[0].endswith(
        "`mean/params/embed:-` does not apply. Return it by its name, as in "
        '`return {"mean": ...}`, to have it follow the rule'
    )


def test_a_bare_tensor_that_is_returned_like_an_argument_is_noted():
    def step(params, x):
        return md.sum(x), params - 1.0

    (note,) = notes(step, "params/embed:data", TREE["w"], TREE["v"])
    assert note.startswith("`1` has the dims of `params`, but not the layout: `params/embed:data`")


def test_gradients_of_an_argument_of_another_name_are_noted_with_what_names_them():
    def loss(p):
        return md.sum(p["w"]) + md.sum(p["v"])

    def step(params):
        return md.value_and_grad(loss)(params)

    (note,) = notes(step, "params/embed:data?", TREE)
    assert note.endswith(
        "Add the rule `gradients/embed:data?`, or call the argument that is differentiated "
        "`params`: the gradients of an argument have its name in their paths"
    )
    assert notes(step, "params/embed:data; gradients/embed:data", TREE) == []


def test_without_scoped_rules_nothing_is_noted():
    assert notes(lambda x, y: (x, y), "embed:data", TREE, TREE) == []


def test_a_scope_that_leaves_out_the_params_of_a_mirror_is_corrected():
    def step(params, optimizer):
        return {"optimizer": {"m": double(optimizer["m"])}}

    with pytest.warns(ScopeWarning, match="Did you mean `m/params/w/embed:data`"):
        md.jit(step, "data:8", "m/w/embed:data").lower(TREE, {"m": TREE})


@pytest.mark.parametrize("extra", [False, True])
def test_parameters_that_are_returned_in_another_structure_are_noted(extra):
    def step(params):
        out = [2.0 * params["w"], 3.0 * params["v"]]
        return 1.0, {"new": out, "norm": md.sum(params["w"])} if extra else out

    found = notes(step, "params/embed:data", TREE)
    assert len(found) == 1
    first = "1/new/0" if extra else "1/0"
    assert f"`{first}` and 1 more have the dims of `params`, but not the layout" in found[0]
    assert 'Return it by its name, as in `return {"params": ...}`' in found[0]


@pytest.mark.parametrize("backend", ["jax", "jax_auto"])
def test_a_state_that_is_a_list_like_the_parameters_is_noted(backend):
    def step(params, momenta, x):
        return double(params), [0.9 * m for m in momenta]

    state = [TREE["w"], TREE["v"]]
    assert notes(step, "params/embed:data", TREE, state, TREE["v"], backend=backend) == [
        "`momenta/0` and 1 more have the dims of `params`, but not the layout: `params/embed:data` "
        "does not apply. Add a rule such as `momenta/embed:data`, or give it the structure of "
        "`params`, as `optim.zeros_like` does"
    ]
    split = "params/embed:data; momenta/embed:data"
    assert notes(step, split, TREE, state, TREE["v"]) == []
    assert notes(step, "params/embed:data", TREE, [TREE["w"], md.spec([embed])], TREE["v"]) == []


@pytest.mark.parametrize("returned", ["alike", "rearranged"])
def test_each_of_many_layers_is_compared_with_few(returned, monkeypatch):
    """Every layer has a rule of its own: they all are split alike, so one stands for all."""
    compared = []
    for name in ("_missed", "_rearranged", "alike"):
        function = getattr(module, name)
        monkeypatch.setattr(
            module, name, lambda *given, of=function: compared.append(1) or of(*given)
        )

    def step(params):
        if returned == "alike":
            return {"params": {key: double(layer) for key, layer in params.items()}}
        return 1.0, [[2.0 * w for w in layer.values()] for layer in params.values()]

    counts = []
    for layers in (10, 40):
        params = {f"layer_{n}": TREE for n in range(layers)}
        layout = "; ".join(f"params/layer_{n}/embed:data" for n in range(layers))
        compared.clear()
        notes(step, layout, params)
        counts.append(len(compared))
    assert counts[1] < 5 * counts[0]


def test_a_rule_whose_scope_no_path_has_is_noted():
    def step(weights):
        return md.sum(weights["w"])

    with pytest.warns(ScopeWarning, match="Did you mean `weights/embed:data`"):
        assert notes(step, "params/embed:data", TREE, backend="numpy") == [
            "`params/embed:data` applies to nothing here: no path has `params`. `weights/v` has "
            "the dim `embed`: write `weights/embed:data`, or call `weights` `params`"
        ]
    for scope in ("params/mlp", "params/*"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ScopeWarning)
            (note,) = notes(step, f"{scope}/embed:data?", TREE, backend="numpy")
        assert note.endswith("has the dim `embed`: write `weights/embed:data?`")
    assert notes(step, "optimizer/embed:data", TREE) == []
    assert notes(step, "params/embed:data; weights/embed:data", TREE) == []


@pytest.mark.parametrize("backend", ["jax", "jax_auto"])
def test_a_mean_of_some_of_the_parameters_is_noted(backend):
    def step(params, ema, x):
        return {key: 0.9 * ema[key] + 0.1 * params[key] for key in ema}

    some = {"w": TREE["w"]}
    assert notes(step, "params/embed:data", TREE, some, TREE["v"], backend=backend) == [
        "`ema/w` has the dims of `params/w`, but not the layout: `params/embed:data` does not "
        "apply. Add the rule `ema/embed:data`, or give it every key of `params`, with None where "
        "it keeps nothing"
    ]
    assert notes(step, "params/embed:data; ema/embed:data", TREE, some, TREE["v"]) == []
    assert notes(step, "params/embed:data; ema/embed:-", TREE, some, TREE["v"]) == []
    every = {"w": TREE["w"], "v": None}

    def by_key(params, ema, x):
        return {"ema": {"w": 0.9 * ema["w"] + 0.1 * params["w"], "v": None}}

    assert notes(by_key, "params/embed:data", TREE, every, TREE["v"]) == []


def test_some_of_the_parameters_that_are_returned_are_noted():
    def step(params):
        return md.sum(params["v"]), {"w": 2.0 * params["w"]}

    (note,) = notes(step, "params/embed:data", TREE)
    assert note == (
        "`1/w` has the dims of `params/w`, but not the layout: `params/embed:data` does not apply. "
        'Return it by a name, as in `return {"new": ...}`, with the rule `new/embed:data`'
    )


def test_trees_of_other_keys_or_dims_than_the_parameters_are_not_noted():
    def step(params, batch, other):
        return md.sum(params["w"]) + md.sum(batch["x"]) + md.sum(other["w"])

    tall = {"w": md.spec([embed])}
    assert notes(step, "params/embed:data", TREE, {"x": TREE["w"]}, tall) == []
