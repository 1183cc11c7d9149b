"""Who holds the state of a training step, and how many bytes a lost host gets back."""

import itertools
import json

import numpy as np
import pytest

import meshdsl as md
from meshdsl.layouts.hardware import hardware
from meshdsl.reports.failures import Costs, as_values, failures, predict, show
from tests.reports.explain.steps import MEGATRON, SMALL, arguments, make_step

COSTS = Costs(mtbf=50_000 * 3600, storage=1e9, restart=300)


def program_of(mesh, layout):
    step = md.jit(make_step(), mesh, layout, donate="state")
    return step.lower(*arguments(**SMALL))


def found(mesh, layout, devices_per_host=4):
    return failures(program_of(mesh, layout), devices_per_host)


def received(program, devices_per_host):
    """Returns the bytes of the different shards of the first host, shard by shard."""
    mesh, total = program.mesh, 0
    first = list(mesh.coordinates())[:devices_per_host]
    for value, path in zip(program.block.inputs, program.input_paths, strict=True):
        if path in program.output_paths:
            axes = sorted(value.layout.split_axes)
            total += len({tuple(c[axis] for axis in axes) for c in first}) * value.bytes
    return total


def test_a_split_optimizer_has_a_single_holder_without_a_replica():
    once = found("data:16", "batch:data; optimizer/embed:data")
    assert [state.name for state in once.held_once] == ["optimizer"]
    assert once.together.single_share == 0.0
    twice = found("replica:2,data:8", "batch:replica+data; optimizer/embed:data")
    assert twice.held_once == ()
    (optimizer,) = [state for state in twice.states if state.name == "optimizer"]
    assert (optimizer.replicas, optimizer.shards, optimizer.copies) == (("replica",), 8, 2)
    assert (optimizer.hosts.least, optimizer.hosts.fatal_pairs) == (2, 2)
    assert optimizer.splits == ("embed:data",)


def test_tensors_with_other_axes_have_rows_of_their_own():
    states = found("data:2,model:4", MEGATRON).states
    rows = {(state.name, state.axes): state.tensors for state in states}
    assert rows == {
        ("params", frozenset({"model"})): 6,
        ("optimizer", frozenset({"model"})): 6,
    }
    states = found("data:2,model:4", "batch:data; heads:model").states
    assert {(s.name, s.axes): s.tensors for s in states if s.name == "params"} == {
        ("params", frozenset({"model"})): 3,
        ("params", frozenset()): 3,
    }


def test_parameters_that_are_an_argument_of_their_own_are_one_kind():
    rows, columns = md.dims(rows=4, columns=8)

    def step(params, x):
        return {"params": {name: w - md.sum(x, "rows") for name, w in params.items()}}

    params = {name: md.spec([columns]) for name in ("gain", "bias")}
    program = md.jit(step, "data:2", "").lower(params, md.spec([rows, columns]))
    (state,) = failures(program, 1).states
    assert (state.name, state.tensors) == ("params", 2)


@pytest.mark.parametrize("devices_per_host", [1, 2, 4, 8])
@pytest.mark.parametrize(
    ("mesh", "layout"),
    [
        ("replica:2,data:4", "batch:replica+data; params/embed:data"),
        ("data:4,model:2", MEGATRON + "; params/embed:data"),
        ("data:8", "batch:data; optimizer/embed:data"),
    ],
)
def test_a_lost_host_gets_back_its_different_shards(mesh, layout, devices_per_host):
    program = program_of(mesh, layout)
    report = failures(program, devices_per_host)
    assert report.bytes_of_host == received(program, devices_per_host)
    assert report.bytes_of_device == received(program, 1)


def lost_with(program, devices_per_host, hosts):
    """Returns the names of tensors that have no copy of some shard once some hosts are lost."""
    lost = set()
    positions = list(program.mesh.coordinates())
    left = [p for number, p in enumerate(positions) if number // devices_per_host not in hosts]
    for value, path in zip(program.block.inputs, program.input_paths, strict=True):
        split = [axes for _, axes in value.layout.splits]

        def shards(positions, split=split):
            return {tuple(p[axis] for axes in split for axis in axes) for p in positions}

        if path in program.output_paths and shards(left) != shards(positions):
            lost.add(path.split("/")[1])
    return lost


@pytest.mark.parametrize(
    ("mesh", "layout", "devices_per_host"),
    [
        ("replica:2,data:4", "batch:replica+data; optimizer/embed:data", 2),
        ("data:4,model:2", MEGATRON + "; params/embed:data", 2),
        ("replica:2,data:2,model:2", "batch:replica+data; heads:model; optimizer/embed:data", 1),
        ("data:5", "batch:data; optimizer/embed:data", 1),
    ],
)
def test_every_set_of_hosts_is_survived_or_not_as_by_losing_it(mesh, layout, devices_per_host):
    program = program_of(mesh, layout)
    values = as_values(failures(program, devices_per_host))
    hosts = range(values["hosts"])
    for count in range(1, len(hosts) + 1):
        for lost in itertools.combinations(hosts, count):
            named = {
                state["name"].split("/")[0]
                for state in values["states"]
                if any({*one} <= {*lost} for one in state["hosts_of_each_shard"])
            }
            assert named == lost_with(program, devices_per_host, lost), lost


def test_the_sets_of_hosts_that_hold_a_shard_are_listed():
    text = show(found("replica:2,data:8", "batch:replica+data; optimizer/embed:data"))
    rows = text[text.index("lost together") :].splitlines()[1:3]
    assert [row.split() for row in rows] == [["optimizer", "0+2;", "1+3"], ["params", "all", "4"]]
    many = show(found("replica:20,data:10", "batch:replica+data; params/embed:data", 1))
    assert "0+10+20+30+... (20 hosts); 1+11+21+31+... (20 hosts)" in many
    assert "; and 7 more (--json)" in many and max(map(len, many.splitlines())) <= 120
    assert "lost together" not in show(found("data:2", "batch:data"))


def test_a_slice_is_survived_where_its_axis_splits_nothing_of_the_state():
    mesh = "slice@dcn:2,data:8"
    report = found(mesh, "batch:slice+data; params/embed:data")
    assert (report.slices.count, report.slices.least) == (2, 2)
    assert report.bytes_of_slice == received(program_of(mesh, "params/embed:data"), 8)
    assert "and of a whole slice" in " ".join(show(report).split())
    across = found(mesh, "batch:slice+data; params/embed:slice+data")
    assert across.slices.least == 1
    assert "and of no slice" in show(across)


def test_a_function_without_state_is_refused():
    program = md.jit(lambda x: md.sum(x, "embed")).lower(md.spec(md.dims(batch=8, embed=4)))
    with pytest.raises(ValueError, match="has no state that lost hosts could take with them"):
        failures(program, 8)


def test_replicas_are_predicted_only_where_hosts_can_be_lost():
    v5p = hardware("v5p")
    twice = found("replica:2,data:8", "batch:replica+data; params/embed:data")
    prediction = predict(twice, 1.0, v5p, COSTS)
    assert prediction.failures_per_day == pytest.approx(4 * 24 / 50_000)
    faults = prediction.checkpoints.faults
    assert faults.write == pytest.approx(twice.bytes_of_host / 1e9)
    assert faults.restart == pytest.approx(300 + twice.bytes_of_host / 1e9)
    assert faults.in_place == 0
    assert prediction.transfer == pytest.approx(twice.bytes_of_host / (4 * 6.25e9))
    replicas = prediction.replicas.faults
    # Two of the six pairs are all holders of a shard: one of three other hosts is the wrong one.
    second = 3 / (50_000 * 3600) * replicas.recovery / 3
    assert replicas.in_place == pytest.approx(np.exp(-second))
    assert prediction.replicas.shares.useful > prediction.checkpoints.shares.useful
    once = found("data:16", "batch:data; params/embed:data")
    assert predict(once, 1.0, v5p, COSTS).replicas is None


def test_where_only_some_hosts_hold_what_no_other_does_the_loss_of_others_is_predicted():
    report = found("replica:2,data:3", "batch:replica+data; params/embed:data", 4)
    assert report.together.fatal == {0}  # it has both copies of the first shard
    replicas = predict(report, 1.0, hardware("v5p"), COSTS).replicas
    assert replicas.faults.in_place == pytest.approx(0.5, rel=1e-3)


def test_where_any_two_hosts_can_be_lost_no_checkpoint_is_needed():
    report = found("replica:3,data:4", "batch:replica+data; params/embed:data")
    way = predict(report, 1.0, hardware("h100"), COSTS, every=7).replicas
    assert way.steps is None and way.faults.in_place == 1.0
    assert way.given.useful <= way.shares.useful < 1
    text = show(report, predict(report, 1.0, hardware("h100"), COSTS, every=7))
    assert "no need" in text and "useful, --checkpoint_every=7" in text


def test_values_have_the_hosts_of_each_shard():
    report = found("replica:2,data:8", "batch:replica+data; params/embed:data")
    values = json.loads(json.dumps(as_values(report, predict(report, 2.0, hardware("v5p"), COSTS))))
    by_name = {state["name"]: state for state in values["states"]}
    assert by_name["params"]["hosts_of_each_shard"] == [[0, 2], [1, 3]]
    assert values["survives"] == {
        "any": 1,
        "singles": 4,
        "of_singles": 4,
        "pairs": 4,
        "of_pairs": 6,
    }
    shares = values["goodput"]["from_checkpoints"]["shares"]
    assert sum(shares.values()) == pytest.approx(1)
