"""Paths of results and states that mirror arguments: which rules of a layout they follow."""

import jax
import numpy as np
import pytest

import meshdsl as md
from meshdsl.tensors import mirrors
from tests.calls import calls_of

embed, d_ff, batch = md.dims(embed=8, d_ff=16, batch=8)
PARAMS = {"w": md.spec([embed, d_ff]), "v": md.spec([d_ff, embed])}
X = md.spec([batch, embed])
FSDP = ("data:8", "batch:data; params/embed:data")


def loss(params, x):
    h = md.tanh(md.einsum(x, params["w"], over="embed"))
    return md.mean(md.square(md.einsum(h, params["v"], over="d_ff") - x))


def descended(params, grads):
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)


def averaged(means, grads):
    return jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, means, grads)


def result_paths(function, *args, **kwargs):
    return list(md.jit(function, **kwargs).trace(*args).output_paths)


def wide_moves(program):
    return sorted(c.kind for c in program.collectives if c.payload_bytes > 64)


def test_parameters_returned_in_a_tuple_stay_where_they_are_stored():
    def step(params, x):
        value, grads = md.value_and_grad(loss)(params, x)
        return value, descended(params, grads)

    program = md.jit(step, *FSDP).lower(PARAMS, X)
    assert list(program.output_paths) == ["0", "params/v", "params/w"]
    assert all(v.layout.axes("embed") == ("data",) for v in program.block.outputs[1:])
    assert wide_moves(program) == ["all_gather", "reduce_scatter"]


def test_an_optimizer_of_the_users_own_is_stored_like_the_parameters():
    def step(params, optimizer, x):
        value, grads = md.value_and_grad(loss)(params, x)
        means = averaged(optimizer["m"], grads)
        return value, descended(params, means), {"m": means}

    program = md.jit(step, *FSDP).lower(PARAMS, {"m": PARAMS}, X)
    assert list(program.input_paths[2:4]) == ["optimizer/m/params/v", "optimizer/m/params/w"]
    assert list(program.output_paths[3:]) == ["optimizer/m/params/v", "optimizer/m/params/w"]
    stored = [*program.block.inputs[:4], *program.block.outputs[1:]]
    assert all(value.layout.axes("embed") == ("data",) for value in stored)
    assert wide_moves(program) == ["all_gather", "reduce_scatter"]


def test_several_runs_in_a_call_hand_on_what_a_tuple_returns():
    def step(params, x):
        value, grads = md.value_and_grad(loss)(params, x)
        return value, descended(params, grads)

    rng = np.random.default_rng(0)
    params = {
        name: md.named(0.1 * rng.standard_normal(one.dims.sizes).astype("f4"), one.dims)
        for name, one in PARAMS.items()
    }
    x = rng.standard_normal((3, 8, 8)).astype("f4")
    several = md.jit(step, donate="params", steps_per_call=3, backend="numpy")
    losses, _ = several(params, md.named(x, ["steps", "batch", "embed"]))
    expected = []
    for part in x:
        value, params = md.jit(step, backend="numpy")(params, md.named(part, ["batch", "embed"]))
        expected.append(float(value))
    np.testing.assert_allclose(losses, expected, rtol=1e-6)


def test_names_above_a_returned_tree_come_first():
    def step(params):
        return {"new": descended(params, params), "more": {"loss": md.sum(params["w"])}}

    assert result_paths(step, PARAMS) == ["more/loss", "new/params/v", "new/params/w"]


def test_a_tree_that_is_returned_alone_has_the_paths_of_its_argument():
    def step(state):
        return state

    assert result_paths(step, {"params": PARAMS, "count": md.spec([], "int32")}) == [
        "state/count",
        "state/params/v",
        "state/params/w",
    ]


def test_of_several_alike_each_has_the_paths_of_parameters():
    def step(params, momentum):
        return md.sum(params["w"]), momentum, params

    graph = md.jit(step).trace(PARAMS, PARAMS)
    assert list(graph.input_paths[2:]) == ["momentum/params/v", "momentum/params/w"]
    assert list(graph.output_paths[1:]) == [
        "1/params/v",
        "1/params/w",
        "2/params/v",
        "2/params/w",
    ]


def test_what_is_returned_by_name_is_no_candidate_for_the_rest():
    def step(params, momentum):
        return {"momentum": momentum, "other": params}

    assert result_paths(step, PARAMS, PARAMS)[2:] == ["other/params/v", "other/params/w"]


def test_returned_gradients_keep_their_names():
    def step(params, x):
        value, grads = md.value_and_grad(loss)(params, x)
        return value, grads

    assert result_paths(step, PARAMS, X)[1:] == ["gradients/params/v", "gradients/params/w"]


def test_gradients_in_another_dtype_follow_the_rules_of_parameters():
    narrow = {name: md.spec(one.dims, "bfloat16") for name, one in PARAMS.items()}

    def step(params):
        return [jax.tree.map(lambda p: md.cast(p, "float32"), params)]

    assert result_paths(step, narrow) == ["0/params/v", "0/params/w"]


def test_a_state_may_have_none_for_some_parameters():
    def step(params, optimizer):
        return {"optimizer": optimizer}

    state = {"m": {"w": PARAMS["w"], "v": None}}
    assert result_paths(step, PARAMS, state) == ["optimizer/m/params/w"]


def test_a_state_made_beside_the_parameters_lies_as_a_step_takes_it():
    def init(key):
        w = md.random.normal(key, [embed, d_ff])
        return {"params": {"w": w}, "optimizer": {"m": {"w": 0.0 * w}}}

    assert result_paths(init, md.random.key(0)) == [
        "optimizer/m/params/w",
        "params/w",
    ]


@pytest.mark.parametrize(
    "other",
    [
        {"w": PARAMS["w"]},  # fewer leaves
        {"w": X, "v": PARAMS["v"]},  # other dims
        {"w": PARAMS["w"], "u": PARAMS["v"]},  # other names
    ],
)
def test_other_trees_keep_their_own_paths(other):
    def step(params, other):
        return 1.0 * params["w"], other

    graph = md.jit(step).trace(PARAMS, other)
    assert list(graph.input_paths[2:]) == [f"other/{name}" for name in sorted(other)]


def test_bare_tensors_keep_their_own_paths():
    assert result_paths(lambda x, y: (x, y), X, X) == ["0", "1"]


def test_paths_stay_unique():
    ends = [("0/w", aval()), ("params/x", aval()), ("params/w", aval("int32"))]
    _, found = mirrors.paths([("params/w", aval())], ends, {})
    assert len(set(found)) == len(found)


def test_twice_the_leaves_are_twice_the_work():
    def work(count):
        leaves = [(f"params/a{n % 7}/b{n % 31}/c{n}", aval()) for n in range(count)]
        ends = [(f"1/{path.split('/', 1)[1]}", a) for path, a in leaves]
        return calls_of(lambda: mirrors.paths(leaves, ends, {}))

    assert work(2000) < 2.2 * work(1000)


def aval(dtype="float32"):
    return md.Shape([embed]), np.dtype(dtype)
