"""The example learns to write text, to the same loss on every layout."""

import runpy
import sys
from pathlib import Path

import numpy as np
import pytest

import meshdsl as md
from meshdsl.generation import Place, RowWriter, Sampling, Writer

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "language_model.py"
SMALL = ["--layers=1", "--embed=32", "--length=32", "--batch_size=8", "--steps=20"]
LAYOUT = "batch:data;heads:model;d_ff:model;params/embed:data"


def run(monkeypatch, capsys, *arguments):
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), *SMALL, *arguments])
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    *_, last = output = capsys.readouterr().out.splitlines()
    assert any(line.startswith("def ") for line in output)
    return float(last.removeprefix("nats per byte on held-out text: "))


@pytest.mark.long
def test_it_learns_the_same_on_a_mesh(monkeypatch, capsys):
    loss = run(monkeypatch, capsys)
    assert loss < 4.8  # a model that knows nothing has 5.55
    on_mesh = run(monkeypatch, capsys, "--mesh_shape=data:2,model:4", f"--layout={LAYOUT}")
    assert on_mesh == pytest.approx(loss, abs=0.002)


@pytest.mark.long
@pytest.mark.parametrize(
    "place", [Place(), Place("data:2,model:2", "heads:model; memory_length:data")]
)
def test_text_that_is_written_step_by_step_is_that_of_the_full_model(place):
    """The window is shorter than the text, so the cache forgets."""
    model = runpy.run_path(str(EXAMPLE))["writing"](32, 2, 8)
    params = md.jit(model.init)(md.random.key(0))
    full = md.jit(lambda model, tokens: md.argmax(model(tokens), "vocab"))
    prompt = [*b"def "]
    wanted = list(prompt)
    for _ in range(12):
        tokens = md.named(np.int32([wanted + [0] * (16 - len(wanted))]), ["batch", "length"])
        wanted.append(int(np.asarray(full(params, tokens))[0, len(wanted) - 1]))
    greedy = Sampling(temperature=0)
    writer = Writer(model, prompt_tokens=4, new_tokens=12, sampling=greedy, place=place)
    writer.load(params)
    assert prompt + [int(token) for (token,) in writer.write([prompt])] == wanted
    rows = RowWriter(model, context=16, rows=2, place=place, cache_tokens=32)
    rows.load(md.jit(model.init)(md.random.key(0)))
    *_, read = rows.read(prompt, greedy)
    rows.join(read, row=1)
    text = [*prompt, read.first, *(int(np.asarray(rows.step())[1, 0]) for _ in range(11))]
    assert text == wanted


def test_targets_are_the_bytes_that_follow_and_nothing_is_held_out_twice():
    windows = runpy.run_path(str(EXAMPLE))["windows"]
    parts = windows(np.arange(103), 5)
    tokens, targets = ([part.arrays[name] for part in parts] for name in ("tokens", "targets"))
    assert [len(part) for part in tokens] == [18, 2]
    assert sorted(np.concatenate(tokens).flat) == list(range(100))
    assert all((after == before + 1).all() for before, after in zip(tokens, targets, strict=True))


def test_too_little_text_is_told(monkeypatch, capsys, tmp_path):
    (tmp_path / "text.txt").write_text("word " * 500)
    with pytest.raises(SystemExit):
        run(monkeypatch, capsys, f"--data={tmp_path}/text.txt")
    assert "2,500 bytes of text are too few: every tenth window" in capsys.readouterr().err
