"""Dropout in a pipeline drops the elements that it drops without one."""

import functools

import pytest

import meshdsl as md
from meshdsl.lowering.options import Options
from tests.lowering.pipelining import dropping
from tests.lowering.pipelining.steps import check_close

PLACES = [("pipe:2", 1), ("pipe:2", 2), ("pipe:4", 1), ("pipe:4", 2)]


@functools.cache
def dropped_alone(run):
    return md.jit(dropping.step(run), backend="numpy")(*dropping.arguments())


@pytest.mark.long
@pytest.mark.parametrize(
    "run", [dropping.split_keys, dropping.carried_key, dropping.computed_again]
)
@pytest.mark.parametrize(("mesh", "rounds"), PLACES)
def test_dropout_drops_the_same_elements(run, mesh, rounds):
    """10 rows in 5 microbatches, each with a key of its own, through 8 layers."""
    options = Options(pipeline_rounds=rounds)
    step = md.jit(dropping.step(run), mesh, "layers:pipe", "numpy", options=options)
    found = step(*dropping.arguments())
    assert step.lower(*dropping.arguments()).pipeline.rounds == rounds
    check_close(found, dropped_alone(run))
    assert 0.85 < float(found.metrics["kept"]) <= 1.0


def test_stages_and_devices_inside_of_them_drop_the_same_elements():
    layout = "layers:pipe; batch:data; d_ff:model; vocab:pipe"
    step = md.jit(dropping.step(dropping.split_keys), "pipe:2,data:2,model:2", layout, "numpy")
    check_close(step(*dropping.arguments()), dropped_alone(dropping.split_keys), 5e-6)
