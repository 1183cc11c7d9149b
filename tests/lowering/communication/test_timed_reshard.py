"""Resharding by time: on a mesh with prices, chains are right, and not slower than by bytes.

The references are `Hardware.seconds`, and of `test_reshard` the simulator of moves and the cheapest
way through the graph of all layouts.
"""

import random
from dataclasses import replace

import pytest

from meshdsl.layouts.hardware import hardware
from meshdsl.layouts.mesh import Mesh
from meshdsl.layouts.prices import LinkPrices
from meshdsl.layouts.tensor_layout import TensorLayout
from meshdsl.lowering.communication.reshard import Move, reshard, reshard_cost
from meshdsl.lowering.communication.reshard_search import Problem
from meshdsl.tensors.dims import Shape, dims
from tests.lowering.communication.test_reshard import at, check, optima, pairs, show


def priced(text: str, name: str) -> Mesh:
    mesh = Mesh.parse(text)
    return replace(mesh, prices=LinkPrices.on(hardware(name), mesh))


def seconds(chain: tuple[Move, ...], mesh: Mesh, name: str) -> float:
    known = hardware(name)
    return sum(
        known.seconds(move.op, move.wire_bytes, move.params["axes"], mesh)
        for move in chain
        if move.op != "slice"
    )


@pytest.mark.long
@pytest.mark.parametrize("name", ["v5p", "h100"])
@pytest.mark.parametrize("kind", ["sum", "max"])
@pytest.mark.parametrize(
    ("sizes", "text"),
    [((8, 8), "a:2 b:4"), ((8, 8), "a@dcn:2 b:4"), ((8, 16, 8), "a@dcn:2 b:2 c:2")],
)
def test_chains_by_time_are_right_and_never_slower_than_those_of_fewest_bytes(
    name, kind, sizes, text
):
    shape, mesh = Shape(dims(**dict(zip("xyz", sizes, strict=False)))), Mesh.parse(text)
    every, by_time, faster = pairs(shape, mesh, kind), priced(text, name), 0
    for start, goal in random.Random(1).sample(every, min(len(every), 150)):
        check(shape, start, goal, by_time)
        for itemsize in (1, 2**24):
            found = reshard(shape, itemsize, start, goal, by_time)
            usual = reshard(shape, itemsize, start, goal, mesh)
            before, now = (seconds(chain, mesh, name) for chain in (usual, found))
            assert now <= 1.01 * before, f"{start} -> {goal}: {show(found)}, not {show(usual)}"
            faster += now < 0.99 * before
    assert faster > 0 or kind == "max" or not mesh.slow


@pytest.mark.parametrize(("sizes", "text"), [((8, 8), "a:2 b:4"), ((8, 8, 4), "a:4 b:2 c:2")])
def test_the_bytes_of_no_chain_cost_less_by_time(sizes, text):
    shape, mesh = Shape(dims(**dict(zip("xyz", sizes, strict=False)))), priced(text, "v5p")
    assert mesh.prices is not None
    every = pairs(shape, mesh, "sum")
    for start, goal in random.Random(2).sample(every, min(len(every), 300)):
        used = {*start.split_axes, *start.partial_axes, *goal.split_axes, *goal.partial_axes}
        best, _ = optima(shape, mesh, "sum", frozenset(mesh.names) - used)[start, goal]
        problem = Problem.between(shape, start, goal, mesh)
        if start == goal:
            continue
        state, cost = problem.start, 0
        for step in problem.cheapest():
            if step.op != "slice":
                cost += problem.wire(step.op, step.axes, problem.payload(step, state))
            state = step.state
        # The problem leaves dims out that are split alike, and axes that it does not use.
        cost *= start.local(shape, mesh).volume // problem.volume(problem.start[0])
        cost *= mesh.size // problem.extent
        assert cost == best, f"{start} -> {goal}"


def test_a_sum_over_a_slow_and_a_fast_axis_is_one_collective_where_both_work_at_once():
    shape, start = Shape(dims(x=4096, y=4096)), TensorLayout().add_partial(["slice", "data"])
    by_bytes, by_time = Mesh.parse("slice@dcn:2 data:4"), priced("slice@dcn:2 data:4", "h100")
    usual = reshard(shape, 4, start, at(), by_bytes)
    assert [move.op for move in usual] == ["reduce_scatter", "all_reduce", "all_gather"]
    assert show(reshard(shape, 4, start, at(), by_time)) == "all_reduce slice data"


def test_of_few_bytes_the_chain_with_fewest_latencies_is_taken():
    shape, start = Shape(dims(x=64)), TensorLayout().add_partial(["slice", "data"])
    by_time = priced("slice@dcn:2 data:4", "h100")
    assert show(reshard(shape, 4, start, at(), by_time)) == "all_reduce slice data"
    cost = reshard_cost(shape, 4, start, at(), by_time)
    assert cost == pytest.approx(hardware("h100").latency * hardware("h100").link_bandwidth)
