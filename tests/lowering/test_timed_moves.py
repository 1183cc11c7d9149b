"""Where the hardware is known, moves of least time are taken where they make a step faster."""

import random as pseudo

import jax
import numpy as np
import pytest

import meshdsl as md
from meshdsl.layouts.hardware import hardware
from meshdsl.layouts.layout import Layout
from meshdsl.layouts.mesh import Mesh
from meshdsl.lowering import decisions, lower
from meshdsl.lowering.choices import Choice
from meshdsl.lowering.costs.simulation import simulate
from meshdsl.lowering.lower import lower as lowered_by
from meshdsl.lowering.options import Options
from meshdsl.lowering.passes.verify import verify
from tests.lowering.placement.test_joint import program_of
from tests.ops.agreement import random

SLICES = "slice@dcn:2,data:4"
SHARED = "batch:slice+data"


def layers(sizes=(16_384, 4_096, 16_384), dtype="bfloat16"):
    """Returns the gradient of a layer of two products, and what it is given."""
    names = ("batch", "features", "hidden")
    batch, features, hidden = md.dims(**dict(zip(names, sizes, strict=True)))

    def loss(weights, x):
        h = md.relu(md.einsum(x, weights["up"], over="features"))
        y = x + md.einsum(h, weights["down"], over="hidden")
        return md.mean(md.square(y))

    shapes = {"up": [features, hidden], "down": [hidden, features]}
    return md.grad(loss), shapes, [batch, features], dtype


def traced(function, shapes, x, dtype):
    weights = {name: md.spec(shape, dtype) for name, shape in shapes.items()}

    def step(params, x):
        return {"params": function(params, x)}

    return md.jit(step).trace(weights, md.spec(x, dtype))


def on(graph, mesh, layout, name, choice=None):
    """Returns a program on some hardware, and its time there."""
    where, known = (Mesh.parse(mesh), Layout.parse(layout)), hardware(name)
    program = lowered_by(graph, *where, Options(hardware=name), choice=choice)
    verify(program)
    return program, simulate(program, known).seconds


def by_bytes(monkeypatch, *args):
    """Returns what lowering does if moves are those of fewest bytes."""
    with monkeypatch.context() as patch:
        patch.setattr(decisions, "strays_from_bytes", lambda *_: False)
        return on(*args)


def kinds(program):
    return [(one.kind, one.axes) for one in program.collectives]


@pytest.mark.parametrize(("name", "most"), [("a100", 0.8), ("h100", 0.75)])
def test_a_sum_over_nodes_and_data_is_one_collective_where_that_is_faster(name, most, monkeypatch):
    args = traced(*layers()), SLICES, SHARED, name
    (slow, before), (fast, now) = by_bytes(monkeypatch, *args), on(*args)
    assert ("reduce_scatter", ("data",)) in kinds(slow)  # in shards over the slow network
    assert set(kinds(fast)) == {("all_reduce", ("slice", "data"))}
    assert now < most * before
    (one,) = [one for one in fast.decisions if one.name == "moves"]
    assert (one.chosen.name, one.other.name) == ("least time", "fewest bytes")
    assert one.chosen.seconds == pytest.approx(now)


def test_on_slices_of_tpus_whose_networks_work_in_turn_sums_stay_in_shards():
    program, _ = on(traced(*layers()), SLICES, SHARED, "v5p")
    assert ("all_reduce", ("slice",)) in kinds(program)
    assert ("all_reduce", ("slice", "data")) not in kinds(program)


def test_axes_of_a_torus_are_used_at_the_same_time(monkeypatch):
    """A gradient is scattered over both at once, not over one and then added up over the other.

    Where 64 devices or more do it, one axis goes after the other in any case.
    """
    args = traced(*layers()), "data:8,context:4", "batch:data+context; params/hidden:data", "v5p"
    (slow, before), (fast, now) = by_bytes(monkeypatch, *args), on(*args)
    assert ("reduce_scatter", ("data", "context")) not in kinds(slow)
    assert ("reduce_scatter", ("data", "context")) in kinds(fast)
    assert fast.wire_bytes == pytest.approx(slow.wire_bytes) and now < 0.99 * before


def test_moves_that_gain_little_are_told_beside_all_other_decisions(monkeypatch):
    """They were taken once, and the other decisions were lost."""
    args = traced(*layers()), "data:16,context:4", "batch:data+context; params/hidden:data", "v5p"
    monkeypatch.setattr(decisions, "_GAIN", 0.9)
    (slow, before), (program, now) = by_bytes(monkeypatch, *args), on(*args)
    assert now == before and kinds(program) == kinds(slow)
    *others, moves = program.decisions
    assert others == [*slow.decisions] and len(others) > 1
    assert (moves.name, moves.chosen.name) == ("moves", "fewest bytes")


def test_without_hardware_bytes_decide():
    program = lowered_by(traced(*layers()), Mesh.parse(SLICES), Layout.parse(SHARED))
    assert ("reduce_scatter", ("data",)) in kinds(program)
    assert program.decisions == ()


def test_no_program_knows_prices():
    program, _ = on(traced(*layers()), SLICES, SHARED, "v5p")
    assert program.mesh.prices is None and program.mesh == Mesh.parse(SLICES)


def test_where_time_changes_no_move_the_lowering_is_the_same_object(monkeypatch):
    found = []
    decide = lower.decide

    def catch(write, *rest):
        found.extend(write(Choice(timed=timed)) for timed in (False, True))
        return decide(write, *rest)

    monkeypatch.setattr(lower, "decide", catch)
    on(traced(*layers()), "data:8", "batch:data", "v5p")
    usual, timed = found
    assert usual.program is timed.program


def test_where_time_follows_bytes_there_is_no_other_lowering(monkeypatch):
    tried = []
    turned = decisions._Switch.turned

    def note(switch, choice):
        tried.append(switch.name)
        return turned(switch, choice)

    monkeypatch.setattr(decisions._Switch, "turned", note)
    on(traced(*layers()), "data:8", "batch:data", "v5p")
    assert tried and "moves" not in tried


MESHES = ("data@dcn:2,model:4", "data:4,model:4", "data@dcn:4,model:2", "data:2,model:16")
LAYOUTS = (
    "rows:model?; channels:data+model?; hidden:data?",
    "rows:data; channels:model; hidden:model?",
    "channels:data+model; hidden:model+data?",
    "rows:data+model?; hidden:data+model",
)


@pytest.mark.parametrize("seed", range(12))
def test_no_random_program_is_slower_than_by_bytes(seed, monkeypatch):
    rng = pseudo.Random(seed)
    function, args, _ = program_of(seed)
    graph = md.jit(function).trace(*args)
    where = graph, rng.choice(MESHES), rng.choice(LAYOUTS), rng.choice(["v5p", "v5e", "h100"])
    monkeypatch.setattr(decisions, "strays_from_bytes", lambda *_: True)
    (_, now), (_, before) = on(*where), by_bytes(monkeypatch, *where)
    assert now <= before * 1.000001


@pytest.mark.parametrize("mesh", ["slice@dcn:2,data:4", "slice@dcn:2,data:2,model:2"])
@pytest.mark.parametrize("name", ["v5p", "h100"])
def test_the_gradients_by_time_are_those_of_numpy(mesh, name, monkeypatch):
    function, shapes, row, _ = layers((16, 8, 24), "float64")
    rules = "batch:slice+data" + ("; hidden:model" if "model" in mesh else "")
    weights, x = {n: random(shape) for n, shape in shapes.items()}, random(row)
    timed = []

    def decide(write, *_):
        timed.append(write(Choice(timed=True)))
        return timed[-1], ()

    monkeypatch.setattr(lower, "decide", decide)
    run = md.jit(function, mesh, rules, "numpy", options=Options(hardware=name))
    found = run(weights, x)
    assert timed and verify(timed[-1].program) is None
    up, down, rows = (np.asarray(each, "float64") for each in (weights["up"], weights["down"], x))
    h = rows @ up
    y = rows + np.maximum(h, 0) @ down
    dy = 2 * y / y.size
    expected = {"down": np.maximum(h, 0).T @ dy, "up": rows.T @ ((dy @ down.T) * (h > 0))}
    for name_, want in expected.items():
        np.testing.assert_allclose(np.asarray(found[name_]), want, rtol=1e-9, atol=1e-12)
    assert len(jax.tree.leaves(found)) == len(expected)
