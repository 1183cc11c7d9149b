"""The example trains as it says, split over space."""

import runpy
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "segmentation.py"


@pytest.mark.long
def test_balls_and_boxes_are_told_apart(monkeypatch, capsys):
    layout = ("--mesh_shape=x:2,y:2", "--layout=depth:x;height:y")
    small = ("--steps=30", "--batch_size=2", "--model_args=filters=4")
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), *layout, *small])
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    last = capsys.readouterr().out.splitlines()[-1]
    assert float(last.removeprefix("nats per voxel on held-out volumes: ")) < 0.3
