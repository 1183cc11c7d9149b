"""The example learns to take noise out of digits, the same on every layout, and draws digits."""

import runpy
import sys
from pathlib import Path

import pytest

pytest.importorskip("sklearn")
EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "diffusion.py"
SMALL = ["--channels=8", "--steps=20", "--batch_size=32"]


def run(monkeypatch, capsys, *arguments):
    """Returns the error on held-out digits, and the lines that show what was drawn."""
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), *SMALL, *arguments])
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    *_, error, share = output = capsys.readouterr().out.splitlines()
    assert 0 <= float(share.removeprefix("drawn digits that are recognised: ")) <= 1
    pictures = [line for line in output if set(line) <= set(" .:*#") and len(line) == 80]
    return float(error.removeprefix("mean square error on held-out digits: ")), pictures


@pytest.mark.long
def test_noise_is_taken_out_the_same_on_rows_that_are_split(monkeypatch, capsys):
    error, pictures = run(monkeypatch, capsys)
    assert error < 0.7  # of guesses of 0 it is 0.8
    assert len(pictures) == 8
    layout = ["--mesh_shape=data:2,rows:2", "--layout=batch:data;height:rows"]
    on_mesh, _ = run(monkeypatch, capsys, *layout)
    assert on_mesh == pytest.approx(error, abs=0.003)


def test_real_digits_are_recognised():
    example = runpy.run_path(str(EXAMPLE))
    training, held_out = example["digits"]()
    some = {name: array[:100] for name, array in held_out.arrays.items()}
    assert example["recognised"](some["image"], some["digit"], held_out) == 1
    assert example["recognised"](some["image"], some["digit"], training) > 0.9
