"""The example trains as it says, on any layout."""

import runpy
import sys
from pathlib import Path

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "digits.py"


def accuracy(monkeypatch, capsys, *arguments):
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), *arguments])
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    last = capsys.readouterr().out.splitlines()[-1]
    return float(last.removeprefix("accuracy on held-out digits: "))


def test_digits_are_recognised(monkeypatch, capsys):
    layout = ("--mesh_shape=data:4,model:2", "--layout=batch:data;hidden:model")
    assert accuracy(monkeypatch, capsys, *layout, "--steps=200") > 0.95
