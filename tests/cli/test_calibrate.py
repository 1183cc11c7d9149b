"""`meshdsl calibrate` and `--hardware=mine.json`: files, reports, and what they refuse."""

from dataclasses import replace
from pathlib import Path

import pytest

from meshdsl.cli import calibrate
from meshdsl.cli.main import run
from meshdsl.layouts.calibration import read
from meshdsl.layouts.hardware import COLLECTIVES
from meshdsl.lowering.backends.jax.calibrating import measuring
from meshdsl.training.exit_codes import UNFINISHED
from tests.layouts.calibrations import SECONDS, be_here, small, written

MINI = ("--model=gpt_mini", "--mesh_shape=data:2,model:4", "--layout=batch:data; heads:model")


def failed(capsys, *arguments):
    assert run(arguments) == 2
    return capsys.readouterr().err


@pytest.fixture
def quick(monkeypatch):
    """Lets a calibration have few families, which take no time."""
    names = ["products/float32/rows", "elementwise", "functions/exp"]
    monkeypatch.setattr(measuring, "families", lambda devices, ranges: names)
    monkeypatch.setattr(measuring, "_seconds", lambda *arguments: 1e-3)
    monkeypatch.setattr(measuring, "dispatch_seconds", lambda *arguments: 1e-3)


@pytest.fixture
def here(monkeypatch):
    """Makes this machine the one of the small calibration."""
    be_here(monkeypatch)


def test_a_calibration_is_written_and_reported(tmp_path, capsys, quick):
    path = str(tmp_path / "mine.json")
    assert run(["calibrate", f"--out={path}"]) == 0
    captured = capsys.readouterr()
    assert "functions/exp is measured, 6 to go" in captured.err
    assert captured.err.endswith(f"{path} is written: use it as --hardware={path}\n")
    assert "best of one device, all at work: " in captured.out
    assert "products/float32/rows" in captured.out and "the worst of these" in captured.out
    assert set(read(path).overlap) == set(COLLECTIVES)
    # Once more, there is nothing to do.
    assert run(["calibrate", f"--out={path}"]) == 0
    assert "is measured" not in capsys.readouterr().err


def test_a_calibration_whose_minutes_are_over_goes_on_later(tmp_path, capsys, quick, monkeypatch):
    path = str(tmp_path / "mine.json")
    moments = iter([0.0, 1.0, 1.0, 100.0])
    monkeypatch.setattr(calibrate.time, "monotonic", lambda: next(moments))
    assert run(["calibrate", f"--out={path}", "--minutes=1"]) == UNFINISHED == 75
    assert "7 families are left: the same command goes on" in capsys.readouterr().err
    assert list(read(path).seconds) == ["products/float32/rows", "elementwise"]
    monkeypatch.undo()


def test_a_calibration_without_time_for_what_is_needed_says_so(
    tmp_path, capsys, quick, monkeypatch
):
    path = str(tmp_path / "mine.json")
    moments = iter([0.0, 100.0])
    monkeypatch.setattr(calibrate.time, "monotonic", lambda: next(moments))
    assert run(["calibrate", f"--out={path}", "--minutes=1"]) == UNFINISHED
    assert "9 families are left: the same command goes on" in capsys.readouterr().err


def test_flags_of_calibrate_are_checked(tmp_path, capsys):
    error = failed(capsys, "calibrate", "--minutes=0")
    assert "--out says where to, as in --out=mine.json" in error
    assert "--minutes: needs more than 0" in error
    error = failed(capsys, "calibrate", "--out=mine.txt")
    assert "--out: mine.txt needs the ending .json, by which --hardware knows it" in error
    (tmp_path / "file").write_text("")
    assert "cannot write" in failed(capsys, "calibrate", f"--out={tmp_path}/file/mine.json")


def test_a_file_of_another_machine_is_not_completed(tmp_path, capsys):
    path = written(tmp_path)
    before = Path(path).read_text()
    error = failed(capsys, "calibrate", f"--out={path}")
    assert (
        f"--out: {path} is of another machine or jaxlib; give another file, or remove it" in error
    )
    assert "jaxlib: 0.0.1 there, " in error and "processor: Fast CPU there, " in error
    assert Path(path).read_text() == before


@pytest.mark.long
def test_explain_takes_the_times_of_a_calibration(tmp_path, capsys, here):
    path = written(tmp_path)
    assert run(["explain", *MINI, f"--hardware={path}"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert f"at the peaks of 8 cpu devices, as measured in {path}: " in text
    assert f"Costs of work: 8 measurements of 2026-01-01 ({path})" in text
    assert "Not among them, and estimated: attention, " in text
    assert "as elementwise work on as many bytes" in text


@pytest.mark.long
def test_sweep_ranks_by_the_times_of_a_calibration(tmp_path, capsys, here):
    path = written(tmp_path)
    layouts = ("--layout=batch:data", "--layout=length:data")
    assert (
        run(["sweep", "--mesh_shape=data:8", *layouts, f"--hardware={path}", "--parallel=1"]) == 0
    )
    assert "step: simulated, by what was measured" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("command", ["explain", "sweep"])
def test_a_calibration_of_another_machine_is_refused_with_what_differs(tmp_path, capsys, command):
    path = written(tmp_path)
    error = failed(capsys, command, *MINI, f"--hardware={path}")
    assert f"--hardware: {path} is of another machine or jaxlib (jaxlib: 0.0.1 there, " in error
    assert "processor: Fast CPU there, " in error
    assert "`meshdsl calibrate --out=here.json` measures this one" in error


def test_override_takes_the_times_of_another_machine(tmp_path, capsys):
    path = written(tmp_path)
    assert run(["explain", *MINI, f"--hardware={path}", "--override"]) == 0
    captured = capsys.readouterr()
    assert f"warning: {path} is of another machine or jaxlib (" in captured.err
    assert captured.err.endswith(": times are those measured there\n")
    assert f"as measured in {path}" in " ".join(captured.out.split())


def test_hardware_that_cannot_be_used_is_a_problem_among_others(tmp_path, capsys):
    error = failed(capsys, "explain", "--hardware=v5q", "--steps=-1")
    assert "--hardware: unknown hardware 'v5q'; choose one of v3, " in error
    assert "Did you mean `v5p`" in error and "--steps: " in error
    path = written(tmp_path)
    Path(path).write_text(Path(path).read_text()[:-40])
    assert f"--hardware: {path} is damaged: line " in failed(
        capsys, "explain", f"--hardware={path}"
    )
    replace(small(), seconds={"elementwise": SECONDS["elementwise"]}).write(path)
    error = failed(capsys, "explain", f"--hardware={path}")
    assert f"{path} is not complete: it has no products" in error
