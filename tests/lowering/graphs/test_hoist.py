"""Weights that are kept are cast first: gathered once per step, in half precision."""

import numpy as np
import pytest

import meshdsl as md
from meshdsl.lowering.graphs.hoist import hoist_casts
from meshdsl.lowering.graphs.simplify import simplify
from meshdsl.lowering.options import Options
from meshdsl.lowering.writing.loops import within
from tests.ops.agreement import random

PARTS, LAYERS, BATCH, EMBED = 2, 3, 8, 16
parts, layers, batch, embed = md.dims(parts=PARTS, layers=LAYERS, batch=BATCH, embed=EMBED)
wide = md.Dimension("wide", 32)
FSDP = "batch:data; params/embed:data"
WEIGHT = EMBED * wide.size  # elements of one layer's weight
PARAMS = {"up": md.spec([layers, embed, wide]), "scale": md.spec([embed])}


def layer(x, w, scale):
    w, scale = md.cast(w, "bfloat16"), md.cast(scale, "bfloat16")
    h = md.relu(md.einsum(x * scale, w, over="embed"))
    return md.einsum(h, w, over="wide")


def loss(params, x):
    apply = md.checkpoint(lambda x, w: (layer(x, w, params["scale"]), None))
    x, _ = md.scan(apply, md.cast(x, "bfloat16"), params["up"], dim="layers")
    return md.sum(md.square(md.cast(x, "float32")))


def step(params, x):
    return {"params": md.grad(loss)(params, x)}


def in_parts(params, x):
    """Adds up the gradients of each of several batches."""

    def add(total, x):
        found = md.grad(loss)(params, x)
        return {name: total[name] + found[name] for name in total}, None

    zeros = {name: md.zeros(t.dims, t.dtype) for name, t in params.items()}
    return {"params": md.scan(add, zeros, x, dim="parts")[0]}


def gathers(function, x, weights, mesh="data:4"):
    program = md.jit(function, mesh, FSDP, options=Options(weights=weights)).lower(PARAMS, x)
    found = [part for one in program.collectives for part in (one.parts or (one,))]
    return [
        (one.payload_bytes, one.count)
        for one in found
        if one.kind == "all_gather" and one.payload_bytes > 100
    ]


def test_kept_weights_are_gathered_once_in_the_dtype_they_are_used_in():
    x = md.spec([batch, embed])
    assert gathers(step, x, "again") == [(2 * WEIGHT, LAYERS)] * 2
    assert gathers(step, x, "keep") == [(2 * WEIGHT * LAYERS, 1)]


def test_once_for_all_microbatches():
    x = md.spec([parts, batch, embed])
    assert gathers(in_parts, x, "again") == [(2 * WEIGHT, LAYERS * PARTS)] * 2
    assert gathers(in_parts, x, "keep") == [(2 * WEIGHT * LAYERS, 1)]


def test_only_weights_and_only_what_makes_them_smaller_is_hoisted():
    graph = simplify(md.jit(step).trace(PARAMS, md.spec([batch, embed])))

    def casts(weights):
        hoisted = simplify(hoist_casts(graph, weights))
        inside = [op for loop in hoisted.operations for body in loop.bodies for op in within(body)]
        return [
            sum(
                op.name == "cast" and op.outputs[0].dtype == dtype and not op.source.backward
                for op in inside
            )
            for dtype in ("bfloat16", "float32")
        ]

    forward = 2  # in the loops of both passes, each
    assert casts([]) == [2 * forward, 0]
    assert casts(graph.inputs[:1]) == [forward, 0]
    assert casts(graph.inputs) == [0, 0]


def test_a_weight_that_is_used_in_both_dtypes_is_handed_to_loops_in_both():
    def both(params, x):
        def body(x, w):
            twice = md.cast(md.cast(w, "bfloat16"), "float64") + w
            return x + md.sum(md.einsum(x, twice, over="wide")), None

        return md.scan(body, x, params["up"], dim="layers")[0]

    arguments = {"up": random([layers, embed, wide])}, random([batch, wide])
    expected = md.jit(both, backend="numpy")(*arguments)
    kept = md.jit(both, "data:4", FSDP, "numpy", options=Options(weights="keep"))(*arguments)
    np.testing.assert_allclose(np.asarray(kept), np.asarray(expected), rtol=1e-12)


@pytest.mark.parametrize("mesh", ["data:4", "data:3"])
@pytest.mark.parametrize(("function", "dims"), [(step, []), (in_parts, [parts])])
def test_the_numbers_stay_the_same(function, dims, mesh):
    params = {name: random(spec.dims) for name, spec in PARAMS.items()}
    x = random([*dims, batch, embed])
    expected = md.jit(function, backend="numpy")(params, x)["params"]
    for weights in ("again", "keep"):
        found = md.jit(function, mesh, FSDP, "numpy", options=Options(weights=weights))(params, x)
        found = found["params"]
        for name in params:
            scale = np.abs(np.asarray(expected[name], np.float64)).max()
            np.testing.assert_allclose(
                np.asarray(found[name], np.float64) / scale,
                np.asarray(expected[name], np.float64) / scale,
                atol=0.02,  # sums in half precision
            )
