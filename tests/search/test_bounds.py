"""Bounds hold: no program that lowering makes is faster, or smaller, than they say."""

import warnings

import pytest

from meshdsl.lowering.costs.simulation import step_seconds
from meshdsl.lowering.lower import lower
from meshdsl.search.searching import Search
from tests.search.steps import gpt, mlp

STEPS = {
    "mlp": lambda: mlp(64, 256, 4),
    "parts": lambda: mlp(64, 512, 3, microbatches=(1, 2, 4)),
    "gpt": lambda: gpt(),
}


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("hardware", ["v5p", "h100"])
def test_no_program_is_below_its_bounds(name, hardware):
    step = STEPS[name]()
    search = Search(step, hardware, 4)
    candidates, _, _ = search.candidates()
    assert len(candidates) > 5
    for row in candidates[:: max(1, len(candidates) // 4)]:
        row = search.estimated(row)
        point = row.point
        graph = step.graph(point.variant)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            program = lower(graph, point.mesh, point.layout, search.exact, step.donated(graph))
        assert step_seconds(program, search.hardware) >= row.bound * 0.999, point
        assert program.peak_bytes >= row.peak * 0.999, point
