"""Loops that reduce each slice of their results: same numbers, same bytes, more collectives."""

import pytest

import meshdsl as md
from meshdsl.lowering.options import Options
from meshdsl.lowering.passes.reduce_inside import reduce_inside
from tests.lowering.passes.running import assert_same
from tests.lowering.passes.test_prefetch import LAYERS, array, problem, scans


def training(params, x, reverse=False):
    def layer(x, w):
        h = md.tanh(md.einsum(x, w["w_in"], over="embed"))
        return x + md.einsum(h, w["w_out"], over="d_ff"), None

    def loss(params):
        y, _ = md.scan(layer, x, params, dim="layers", reverse=reverse)
        return md.mean(md.square(y))

    return md.value_and_grad(loss)(params)


def lowered(function, arguments, layout="batch:data", mesh="data:4"):
    jitted = md.jit(function, mesh, layout, "numpy", options=Options(bucket_bytes=0))
    return jitted.lower(*arguments)


@pytest.mark.parametrize("backend", ["numpy", "jax"])
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(
    ("layout", "kind"),
    [("batch:data", "all_reduce"), ("batch:data; gradients/embed:data", "reduce_scatter")],
)
def test_gradients_of_layers_are_reduced_one_by_one(backend, reverse, layout, kind):
    arguments = problem()
    before = lowered(lambda params, x: training(params, x, reverse), arguments, layout)
    after = reduce_inside(before)
    assert_same(before, after, arguments, backend)
    assert after.wire_bytes == pytest.approx(before.wire_bytes)
    counts = sorted(one.count for one in after.collectives if one.kind == kind)
    assert counts[-2:] == [LAYERS, LAYERS]
    slices = 8 * 12 * 8
    assert reduce_inside(before, slices).wire_bytes == after.wire_bytes
    assert reduce_inside(before, slices + 1) is before


def test_a_result_that_is_read_elsewhere_or_has_a_split_stack_is_reduced_after_the_loop():
    def function(x, w):
        _, rows = md.scan(lambda x, w: (x, md.einsum(x, w, over="batch")), x, w, dim="layers")
        return rows

    arguments = array(batch=8, embed=8), array(layers=4, batch=8)
    assert reduce_inside(lowered(function, arguments)) is not lowered(function, arguments)
    split = lowered(function, arguments, "batch:data; layers:data?", "data:4")
    assert reduce_inside(split) is split or not any(
        one.layout.axes("layers") for scan in scans(split) for one in scan.outputs
    )

    def twice(x, w):
        rows = function(x, w)
        return md.sum(rows, "layers"), md.sum(md.square(rows), "embed")

    before = lowered(twice, arguments)
    assert_same(before, reduce_inside(before), arguments)


def test_a_loop_that_has_reduced_stays():
    after = reduce_inside(lowered(training, problem()))
    assert reduce_inside(after) is after
