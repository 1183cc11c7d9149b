"""The work of tracing and lowering, in calls of Python functions: linear in the parameters."""

import importlib
from collections.abc import Callable

import pytest

import meshdsl as md
from meshdsl.lowering import lower
from meshdsl.lowering.costs.memory import _History, memory
from meshdsl.lowering.placement import placing, planning
from meshdsl.lowering.placement.mincut import CutGraph
from meshdsl.lowering.program import SpmdProgram
from tests.benchmarks.lowering_time import LEAVES, mlp
from tests.calls import calls_of


def job(leaves: int, mesh: str, layout: str) -> Callable[[], SpmdProgram]:
    """Returns a function that traces and lowers a training step with so many parameters."""
    step, specs = mlp(leaves)
    return lambda: md.jit(step, mesh=mesh, layout=layout, donate="state").lower(*specs)


@pytest.mark.parametrize(
    ("mesh", "layout"),
    [
        *(("data:8", layout) for layout in LEAVES.values()),
        ("data:4,model:2", "batch:data; wide:model; params/hidden:data"),
    ],
)
def test_four_times_the_parameters_take_four_times_the_calls(mesh, layout):
    job(8, mesh, layout)()  # fills what is remembered between calls
    few, many = (calls_of(job(leaves, mesh, layout)) for leaves in (32, 128))
    assert many < 4.2 * few


@pytest.mark.parametrize(("name", "calls"), [("data parallel", 6_500), ("FSDP", 11_000)])
def test_a_parameter_takes_few_calls(name, calls):
    # About 20 instructions for each: a matrix product, its gradients, AdamW.
    job(8, "data:8", LEAVES[name])()
    few, many = (calls_of(job(leaves, "data:8", LEAVES[name])) for leaves in (16, 48))
    assert (many - few) / 32 < calls


def test_equal_updates_share_their_strategies():
    step, specs = mlp(16)
    stages = md.jit(step, "data:8", LEAVES["FSDP"], donate="state").stages(*specs)
    roots = [s for op, s in stages.planned.strategies.items() if op.name == "sqrt"]
    assert len(roots) >= 16
    assert len({id(strategy) for strategy in roots}) <= 2


def test_the_memory_model_follows_what_is_computed_in_passing_once():
    # The residual stream is a chain of sums without buffers: each reads all that are before it.
    few, many = (job(leaves, "data:8", "batch:data")() for leaves in (64, 256))
    assert calls_of(lambda: memory(many)) < 4.2 * calls_of(lambda: memory(few))


def test_live_buffers_are_listed_once_for_a_block_whose_peak_grows_all_the_way(monkeypatch):
    listed = []
    at = _History.at
    monkeypatch.setattr(
        _History, "at", lambda self, moment: listed.append(moment) or at(self, moment)
    )
    program = job(64, "data:8", "batch:data")()
    listed.clear()
    buffers = memory(program).buffers
    assert len(listed) == 1
    assert sum(buffer.bytes for buffer in buffers) == memory(program).peak_bytes


def test_a_cut_takes_as_many_rounds_for_many_layers_as_for_few(monkeypatch):
    rounds = []
    levels = CutGraph._levels
    monkeypatch.setattr(CutGraph, "_levels", lambda cut: rounds.append(cut) or levels(cut))
    counts = []
    for leaves in (16, 64):
        rounds.clear()
        job(leaves, "data:4,model:2", "batch:data; wide:model; params/hidden:data")()
        counts.append(len(rounds))
    assert counts[0] == counts[1]


def test_a_plan_surveys_what_is_made_of_nothing_once(monkeypatch):
    surveys = []
    survey = placing.constants
    monkeypatch.setattr(placing, "constants", lambda graph: surveys.append(graph) or survey(graph))
    for name in ("reads", "late_gathers", "partial_sums"):
        assert not hasattr(
            importlib.import_module(f"meshdsl.lowering.placement.{name}"), "from_nothing"
        )
    placed = []
    place = placing.place

    def counted(*given, **more):
        placed.append(1)
        return place(*given, **more)

    for room in (lower, planning):
        monkeypatch.setattr(room, "place", counted)
    job(8, "data:8", LEAVES["FSDP"])()
    assert len(surveys) == len(placed) > 0
