"""The example tells groups by neighbours, on split edges; without messages it cannot."""

import runpy
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "graph.py"


def accuracy(monkeypatch, capsys, *arguments):
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), *arguments, "--steps=60"])
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    last = capsys.readouterr().out.splitlines()[-1]
    return float(last.removeprefix("accuracy of the other nodes' groups: "))


@pytest.mark.long
def test_neighbours_tell_the_groups_that_features_do_not(monkeypatch, capsys):
    assert accuracy(monkeypatch, capsys, "--mesh_shape=data:8", "--layout=edges:data") > 0.88
    assert accuracy(monkeypatch, capsys, "--layers=0") < 0.75
