"""The example finds what a long text is about, the same in all ways to split it."""

import runpy
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "long_context.py"
SMALL = ["--length=128", "--batch_size=16", "--steps=60"]
PARALLEL = "--layout=batch:data;length:context;memory_length:context"
ULYSSES = "--layout=batch:data;heads:context;length:context?;params/heads:-"


def run(monkeypatch, capsys, *arguments):
    """Returns the share of topics that were found, and the MiB that a device holds and sends."""
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), *SMALL, *arguments])
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    *_, costs, found = capsys.readouterr().out.splitlines()
    held, sent = [float(word) for word in costs.split() if word[0].isdigit()]
    return float(found.removeprefix("topics that were found: ")), held, sent


@pytest.mark.long
def test_topics_are_found_the_same_on_split_texts(monkeypatch, capsys):
    found, held, sent = run(monkeypatch, capsys)
    assert found > 0.7 and sent == 0  # a guess finds 1 of 8
    for arguments in ([PARALLEL, "--context=ring", "--zigzag"], [ULYSSES]):
        on_mesh, less, sent = run(monkeypatch, capsys, "--mesh_shape=data:2,context:4", *arguments)
        assert on_mesh == pytest.approx(found, abs=0.02)
        assert less < held / 4 and sent > 0


@pytest.mark.slow
def test_topics_further_back_than_a_window_are_guessed(monkeypatch, capsys):
    found, _, _ = run(monkeypatch, capsys, "--window=8")
    assert found < 0.35
