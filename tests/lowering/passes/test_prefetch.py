"""Loops that gather one iteration ahead: same numbers, one gather more, one layer more held."""

import numpy as np
import pytest

import meshdsl as md
from meshdsl.lowering.options import Options
from meshdsl.lowering.passes.prefetch import prefetch
from tests.lowering.passes.running import assert_same

RNG = np.random.default_rng(0)
AHEAD = Options(prefetch=True)
FSDP = "batch:data; params/embed:data; gradients/embed:data"
LAYERS = 4


def array(dtype="float64", **dims):
    data = RNG.normal(size=tuple(dims.values())).astype(dtype)
    return md.named(data, list(md.dims(**dims)))


def problem(layers=LAYERS):
    params = {
        "w_in": array(layers=layers, embed=8, d_ff=12),
        "w_out": array(layers=layers, d_ff=12, embed=8),
    }
    return params, array(batch=8, embed=8)


def network(params, x):
    def layer(x, w):
        h = md.tanh(md.einsum(x, w["w_in"], over="embed"))
        return x + md.einsum(h, w["w_out"], over="d_ff"), None

    return md.scan(layer, x, params, dim="layers")[0]


def training(params, x):
    return md.value_and_grad(lambda params: md.mean(md.square(network(params, x))))(params)


def both(function, arguments, layout=FSDP, mesh="data:4"):
    before = md.jit(function, mesh, layout, "numpy").lower(*arguments)
    return before, prefetch(before)


def gathers(program):
    return [one for one in program.collectives if one.kind == "all_gather"]


def scans(program):
    return [one for one in program.block.instructions if one.op == "scan"]


@pytest.mark.parametrize("backend", ["numpy", "jax"])
def test_the_forward_pass_gathers_one_layer_ahead(backend):
    arguments = problem()
    before, after = both(network, arguments)
    assert_same(before, after, arguments, backend)
    assert [one.count for one in gathers(before)] == [LAYERS]
    assert [one.count for one in gathers(after)] == [1, LAYERS]  # the first, and each next one
    assert len(gathers(after)[0].parts) == 2
    (scan,) = scans(after)
    assert scan.params["body"].instructions[0].op == "all_gather"
    assert scan.params["ahead"] == (2, 3)


@pytest.mark.parametrize("backend", ["numpy", "jax"])
def test_the_backward_pass_gathers_one_layer_ahead_from_the_last_to_the_first(backend):
    arguments = problem()
    before, after = both(training, arguments)
    assert_same(before, after, arguments, backend)
    ahead = [scan for scan in scans(after) if "ahead" in scan.params]
    assert [scan.params["reverse"] for scan in ahead] == [False, True]
    own = [one.count for one in gathers(before)]
    assert sorted(one.count for one in gathers(after)) == sorted([*own, *(1 for _ in own)])


def test_it_costs_one_more_layer_of_gathered_weights():
    before, after = both(network, problem())
    gathered = 2 * 8 * 12 * 8
    assert before.peak_bytes < after.peak_bytes <= before.peak_bytes + 2 * gathered


def test_what_is_cast_before_it_is_gathered_is_cast_ahead():
    def mixed(params, x):
        def layer(x, w):
            h = md.tanh(md.einsum(x, md.cast(w["w_in"], "float32"), over="embed"))
            return x + md.einsum(h, md.cast(w["w_out"], "float32"), over="d_ff"), None

        return md.scan(layer, x, params, dim="layers")[0]

    params, _ = problem()
    arguments = params, array("float32", batch=8, embed=8)
    before = md.jit(mixed, "data:4", FSDP, "numpy").lower(*arguments)
    after = prefetch(before)
    body = scans(after)[0].params["body"]
    ops = [one.op for one in body.instructions]
    assert ops.index("all_gather") < ops.index("einsum")
    assert {one.inputs[0].dtype for one in body.instructions if one.op == "all_gather"} == {
        np.dtype("float32")
    }
    assert_same(before, after, arguments)


def test_gathers_of_what_the_body_computes_stay():
    def body(x, w):
        near = md.exp(-md.square(md.outer(md.subtract, x, x.rename(length="other"))))
        return w * md.sum(near, "other"), None

    def function(x, w):
        return md.scan(body, x, w, dim="layers")[0]

    before, after = both(function, (array(length=8), array(layers=3)), "length:data")
    assert [one.count for one in gathers(before)] == [3] and after is before


def test_what_is_ahead_goes_no_further_ahead():
    _, after = both(network, problem())
    assert prefetch(after) is after


def test_weights_that_are_gathered_again_behind_a_barrier_are_gathered_ahead():
    def training(params, x):
        def layer(x, w):
            h = md.tanh(md.einsum(x, w["w_in"], over="embed"))
            return x + md.einsum(h, w["w_out"], over="d_ff")

        def loss(params):
            again = md.checkpoint(layer)
            x_end, _ = md.scan(lambda x, w: (again(x, w), None), x, params, dim="layers")
            return md.mean(md.square(x_end))

        return md.value_and_grad(loss)(params)

    arguments = problem()
    before, after = both(training, arguments)
    bodies = [scan.params["body"] for scan in scans(before)]
    assert any(one.op == "barrier" for body in bodies for one in body.instructions)
    assert ["ahead" in scan.params for scan in scans(after)] == [True, True]
    assert_same(before, after, arguments)


def test_what_lies_behind_several_barriers_is_gathered_ahead():
    def layer(x, w):
        return x + md.tanh(md.einsum(x, w["w_in"], over="embed").rename(d_ff="embed"))

    def training(params, x):
        def loss(params):
            again = md.checkpoint(md.checkpoint(layer))
            x_end, _ = md.scan(lambda x, w: (again(x, w), None), x, params, dim="layers")
            return md.mean(md.square(x_end))

        return md.value_and_grad(loss)(params)

    params = {"w_in": array(layers=LAYERS, embed=8, d_ff=8)}
    arguments = params, array(batch=8, embed=8)
    before, after = both(training, arguments)
    bodies = [scan.params["body"] for scan in scans(before)]
    assert [one.op for body in bodies for one in body.instructions].count("barrier") == 2
    assert ["ahead" in scan.params for scan in scans(after)] == [True, True]
    assert_same(before, after, arguments)


def test_what_leads_to_a_gather_that_is_done_ahead_is_not_left_in_the_body():
    def mixed(params, x):
        def layer(x, w):
            w = md.cast(w["w_in"], "float32")
            return md.tanh(md.einsum(x, w, over="embed").rename(d_ff="embed")), None

        return md.scan(layer, x, params, dim="layers")[0]

    params = {"w_in": array(layers=LAYERS, embed=8, d_ff=8)}
    arguments = params, array("float32", batch=8, embed=8)
    program = md.jit(mixed, "data:4", FSDP, options=AHEAD).lower(*arguments)
    ops = [one.op for one in scans(program)[0].params["body"].instructions]
    assert (ops.count("cast"), ops.count("all_gather")) == (1, 1)


def test_a_loop_of_one_iteration_and_split_stacks_stay():
    before, after = both(network, problem(layers=1))
    assert after is before
    before, after = both(network, problem(), "layers:data")
    assert after is before


def test_the_option_is_passed_on():
    arguments = problem()
    jitted = md.jit(network, "data:4", FSDP, options=AHEAD)
    program = jitted.lower(*arguments)
    assert any("ahead" in scan.params for scan in scans(program))
    found = np.asarray(jitted(*arguments))
    np.testing.assert_allclose(found, np.asarray(md.jit(network)(*arguments)), rtol=1e-9)
    assert "carry" in str(program)
