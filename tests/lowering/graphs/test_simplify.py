"""Simplification: equal work once, needless work never, and the same numbers."""

import gc
import weakref

import numpy as np

import meshdsl as md
from meshdsl.lowering.graphs.simplify import simplify
from tests.ops.agreement import random, run

a, steps = md.dims(a=4, steps=3)


def names(function, *args):
    return [op.name for op in simplify(md.jit(function).trace(*args)).operations]


def test_equal_operations_occur_once():
    assert names(lambda x: md.exp(x) + md.exp(x), random([a])) == ["exp", "add"]


def test_constants_that_only_compare_equal_stay_apart():
    assert names(lambda: [md.full([], 0.0), md.full([], -0.0)]) == ["full", "full"]
    assert names(lambda: [md.full([], 1), md.full([], 1.0), md.full([], True)]).count("full") == 3
    assert names(lambda: [md.full([], 1, "int32"), md.full([], 1)]) == ["full", "full"]


def test_parameters_that_only_compare_equal_stay_apart():
    signed = md.primitive(
        "signed",
        shape=lambda x, *, by: x.shape,
        emitters={"numpy": lambda x, *, by: x + np.copysign(1.0, by) + isinstance(by, bool)},
    )
    x = md.named(np.zeros(4), [a])
    found = run(lambda x: [signed(x, by=by) for by in (0.0, -0.0, 1, True, 1.0)], x)
    assert [np.asarray(f)[0] for f in found] == [1, -1, 1, 2, 1]


def test_what_no_output_needs_is_gone():
    def model(x):
        md.exp(x)
        return md.sin(x)

    assert names(model, random([a])) == ["sin"]


def test_checkpoints_are_inlined():
    assert names(lambda x: md.checkpoint(md.sin)(x), random([a])) == ["sin"]


def test_what_is_computed_again_is_kept_apart():
    def loss(x):
        return md.sum(md.checkpoint(lambda x: md.sin(md.exp(x)))(x))

    found = names(lambda x: md.value_and_grad(loss)(x), random([a]))
    assert found.count("exp") == 2
    assert found.count("barrier") == 1


def test_scans_lose_what_is_not_needed():
    def model(x, xs):
        def body(state, x):
            kept, idle = state
            return (kept + x["p"], idle * 2), (idle, kept)

        (kept, _), (_, ys) = md.scan(body, (x, x), {"p": xs, "q": xs}, "steps")
        return kept, ys

    graph = simplify(md.jit(model).trace(random([a]), random([steps, a])))
    (scan,) = graph.operations
    assert len(scan.inputs) == 2
    assert len(scan.outputs) == 2
    assert [op.name for op in scan.params["body"].operations] == ["add"]


def test_an_input_nobody_reads_stays_an_input():
    graph = simplify(md.jit(lambda x, y: x).trace(random([a]), random([steps])))
    assert graph.input_paths == ("x", "y")
    assert graph.operations == ()


def test_a_scan_stacks_a_tensor_once_for_its_result_and_its_gradient():
    steps, a = md.dims(steps=4, a=3)

    def loss(x):
        _, ys = md.scan(lambda c, _: (md.tanh(c), md.tanh(c)), x, None, steps)
        return md.sum(md.square(ys))

    program = md.jit(md.grad(loss), backend="numpy").lower(md.spec([a]))
    forward = next(i for i in program.block.instructions if i.op == "scan")
    assert [v.shape.names for v in forward.outputs] == [("a",), ("steps", "a")]


def test_what_is_renamed_twice_is_renamed_once():
    x = md.spec(md.dims(a=2, b=3))

    def twice(x):
        return x.rename({"a": "c"}).rename({"c": "d", "b": "e"})

    def back(x):
        return x.rename({"a": "c"}).rename({"c": "a"}) + 1

    graph = simplify(md.jit(twice).trace(x))
    assert [(op.name, op.params) for op in graph.operations] == [
        ("rename", {"names": {"a": "d", "b": "e"}})
    ]
    assert "rename" not in [op.name for op in simplify(md.jit(back).trace(x)).operations]


def test_a_graph_is_simplified_once_and_freed_with_it():
    graph = md.jit(lambda x: md.checkpoint(md.sin)(x)).trace(md.spec([a], "float32"))
    simplified = simplify(graph)
    assert simplify(graph) is simplified
    left = weakref.ref(graph), weakref.ref(simplified)
    del graph, simplified
    gc.collect()
    assert [reference() for reference in left] == [None, None]


def test_a_graph_is_freed_though_an_emitter_refers_to_it():
    class Model:
        def __init__(self):
            scaled = md.primitive(
                "scaled",
                shape=lambda x: x.shape,
                emitters={"numpy": lambda x: self.scale * x},
            )
            self.scale = 2.0
            self.graph = md.jit(scaled).trace(md.spec([a], "float32"))

    model = Model()
    left = weakref.ref(model.graph), weakref.ref(simplify(model.graph))
    del model
    gc.collect()
    assert [reference() for reference in left] == [None, None]
