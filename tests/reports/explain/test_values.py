"""An explanation as data: what it says agrees with the explanation, and JSON can hold it."""

import json

import pytest

from meshdsl.reports.explain.values import as_values
from tests.reports.explain.steps import explained


@pytest.fixture(scope="module")
def both():
    report = explained()[1]
    return report, json.loads(json.dumps(as_values(report)))


def test_the_parts_of_memory_add_up_to_the_peak(both):
    report, values = both
    assert sum(values["memory"].values()) == values["peak_bytes"] == report.memory.peak_bytes
    held = sum(one["bytes"] for one in values["held"])
    inputs = sum(values["memory"][part] for part in ("parameters", "optimizer", "batch"))
    assert held + inputs == values["peak_bytes"]


def test_times_add_up(both):
    report, values = both
    waits = sum(one["seconds"] for one in values["waits"])
    assert waits == pytest.approx(values["exposed_seconds"], rel=1e-5)
    assert values["work_seconds"] + waits == pytest.approx(values["seconds"], rel=1e-5)
    intervals = sum(one["seconds"] for one in values["intervals"])
    assert intervals == pytest.approx(values["at_peaks"]["seconds"], rel=1e-5)
    assert sum(values["at_peaks"]["times"].values()) == pytest.approx(report.timeline.seconds)


def test_every_collective_has_its_line_and_axes(both):
    _, values = both
    assert sum(one["wire_bytes"] for one in values["sent"]) == pytest.approx(values["wire_bytes"])
    assert {axis for one in values["sent"] for axis in one["axes"]} == {"data", "model"}
    assert all("steps.py:" in one["line"] for one in values["sent"])


def test_inputs_say_which_axes_split_their_dims(both):
    _, values = both
    inputs = {one["path"]: one for one in values["inputs"]}
    query = next(one for path, one in inputs.items() if path.endswith("params/blocks/query"))
    heads = next(dim for dim in query["dims"] if dim["name"] == "heads")
    assert heads == {"name": "heads", "size": 4, "local": 1, "axes": ["model"]}
    assert {one["part"] for one in inputs.values()} == {"parameters", "optimizer", "batch"}
