"""The example trains adapters alone, from weights of a file, to the same loss on every layout."""

import re
import runpy
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "fine_tune.py"
SIZES = "layers=1,embed=32,heads=4,kv=8,d_ff=64,vocab=256"
SMALL = [f"--model_args={SIZES}", "--length=32", "--batch_size=8", "--first_steps=60", "--steps=40"]


def run(monkeypatch, capsys, *arguments):
    """Returns what adapters learn, and what there is besides; the losses before and after."""
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), *SMALL, *arguments])
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    *_, sizes, losses = capsys.readouterr().out.splitlines()
    counts = [int(word.replace(",", "")) for word in re.findall(r"[\d,]+", sizes)]
    return counts, [float(word) for word in re.findall(r"\d\.\d+", losses)]


@pytest.mark.long
def test_adapters_learn_from_saved_weights_the_same_on_a_mesh(monkeypatch, capsys):
    lora = "--lora=blocks/**/query:2,blocks/**/w_in:2"
    (adapters, every), (before, after) = run(monkeypatch, capsys, lora)
    assert adapters == 2 * (32 + 32) + 2 * (32 + 64)  # of query and of w_in
    assert every - adapters == 256 * 32 + 4 * 32 * 32 + 2 * 32 * 64 + 3 * 32  # with three norms
    assert after < before - 0.1 and before < 5.5
    layout = ["--mesh_shape=data:2,model:4", "--layout=batch:data;heads:model;d_ff:model"]
    _, on_mesh = run(monkeypatch, capsys, lora, *layout)
    assert on_mesh == pytest.approx([before, after], abs=0.003)
