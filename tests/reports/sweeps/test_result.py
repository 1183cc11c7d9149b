"""What a row says of a program is what the program says."""

import dataclasses
import math

import pytest

import meshdsl as md
from meshdsl.reports.explain import explain
from meshdsl.reports.sweeps.candidates import Candidate
from meshdsl.reports.sweeps.result import Result, planned, sent_over

MESH = "data:2,row:2,model:4"
ROW = Result(
    "data:2",
    "batch:data; größe:data",
    seconds=0.1,
    quartiles=(0.1, 0.3),
    wire_bytes={"data": 1.5},
    peak_bytes=3,
    fits=True,
    notes=("one", "two"),
)


def lowered(layout, mesh=MESH):
    layers, batch, embed, d_ff = md.dims(layers=3, batch=16, embed=32, d_ff=64)

    def step(x, params):
        def body(carry, w):
            hidden = md.einsum(carry, w, over="embed")
            return md.einsum(hidden, w, over="d_ff"), md.sum(hidden)

        return md.scan(body, x, params, dim="layers")

    x, w = md.spec([batch, embed]), md.spec([layers, embed, d_ff])
    return md.jit(step, mesh, layout).lower(x, w)


@pytest.mark.parametrize(
    "layout",
    [
        "batch:data; d_ff:model",
        "batch:data+row; d_ff:model; params/embed:data+row",
        "",
        "embed:row",
    ],
)
def test_bytes_over_axes_are_those_of_the_collectives(layout):
    program = lowered(layout)
    expected = {}
    for moved in program.collectives:
        axes = "+".join(name for name, _ in program.mesh.axes if name in moved.axes)
        expected[axes] = expected.get(axes, 0.0) + moved.wire_bytes * moved.count
    found = sent_over(program)
    assert found == pytest.approx(expected)
    assert math.fsum(found.values()) == pytest.approx(program.wire_bytes)


def test_the_plan_of_a_candidate_is_its_explanation():
    program = lowered("batch:data; d_ff:model")
    report, candidate = explain(program, "v5e"), Candidate(MESH, "batch:data; d_ff:model")
    for room in (program.peak_bytes, program.peak_bytes - 1):
        found = planned(candidate, report, program, room)
        assert found.fits == (room == program.peak_bytes)
        assert found.candidate == candidate
        assert (found.devices, found.reason) == (16, "")
        assert found.seconds == found.estimated_seconds == report.simulated.seconds
        assert found.overlapped_seconds == report.timeline.overlapped_seconds
        assert found.peak_bytes == found.planned_peak_bytes == report.memory.peak_bytes
        assert found.wire == pytest.approx(report.wire_bytes)


def test_a_result_survives_json():
    import json

    text = ROW.as_json()
    assert "\n" not in text and "größe" in text
    assert Result.of_json(json.loads(text)) == ROW
    with pytest.raises(TypeError, match="a result has"):
        Result.of_json({"mesh": "data:2"})
    assert {field.name for field in dataclasses.fields(Result)} == json.loads(text).keys()
