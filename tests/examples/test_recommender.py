"""The example guesses ratings nearly as well as their noise allows, with split tables."""

import runpy
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "recommender.py"


@pytest.mark.long
def test_ratings_are_guessed_as_well_as_their_noise_allows(monkeypatch, capsys):
    layout = "--mesh_shape=data:2,model:4", "--layout=batch:data;users:model;items:model"
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), *layout, "--steps=150"])
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    last = capsys.readouterr().out.splitlines()[-1]
    error = float(last.removeprefix("error on held-out ratings: ").partition(";")[0])
    assert 0.19 < error < 0.3  # the noise is 0.2, and the ratings themselves spread over 1
