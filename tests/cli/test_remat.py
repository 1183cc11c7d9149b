"""`--remat=auto`: the fastest way that fits, the same one in every command."""

import json
import re
from dataclasses import replace

import pytest

from meshdsl.cli import flags, job
from meshdsl.cli.main import run
from meshdsl.cli.planning.steps import decided, training_step
from meshdsl.layouts.hardware import hardware
from meshdsl.lowering.costs.simulation import step_seconds
from meshdsl.lowering.costs.units import show_bytes, show_seconds
from meshdsl.models.remat import KINDS

SIZES = "--model_args=layers=4,embed=1024,heads=8,d_ff=4096"
WHERE = ("--mesh_shape=data:4,model:2", "--layout=batch:data; heads:model; d_ff:model")
GIVEN = (SIZES, "--batch_size=64", "--length=256", "--policy=compute=bfloat16", *WHERE)


def built(*arguments):
    values, problems = flags.read([*GIVEN, *arguments])
    return job.on_given_hardware(job.build(values, problems), values)


@pytest.fixture(scope="module")
def every():
    """Returns the seconds and the peak of the step by each policy, lowered by itself."""
    found = {}
    for policy in KINDS:
        one = built("--hardware=v5p", f"--remat={policy}")
        program = training_step(one, one.layout)
        found[policy] = step_seconds(program, hardware("v5p")), program.peak_bytes
    return found


@pytest.mark.long
def test_without_a_limit_the_fastest_is_taken_and_the_others_are_priced(every):
    one = decided(built("--hardware=v5p", "--remat=auto"))
    fastest = min(every, key=lambda policy: every[policy][0])
    assert one.model.config.remat == fastest == "none"
    assert training_step(one, one.layout).decisions[:3] == one.decisions
    assert {each.other.name for each in one.decisions} == {*KINDS} - {fastest}
    for each in one.decisions:
        assert (each.name, each.fits) == ("remat", True)
        for way in (each.chosen, each.other):
            assert (way.seconds, way.peak_bytes) == every[way.name]


def test_memory_is_a_limit(every):
    less = min(peak for _, peak in every.values())
    assert less < 0.7 * every["none"][1]
    asked = built("--hardware=v5p", "--remat=auto")
    limit = int(less * 1.02)
    one = decided(replace(asked, options=replace(asked.options, memory=limit)))
    assert one.model.config.remat != "none"
    assert training_step(one, one.layout).peak_bytes <= limit
    (none,) = [each for each in one.decisions if each.other.name == "none"]
    assert not none.fits


@pytest.mark.long
def test_sweep_takes_what_explain_takes(tmp_path, capsys):
    given = (*GIVEN, "--hardware=v5p", "--remat=auto")
    assert run(["explain", *given]) == 0
    text = capsys.readouterr().out
    assert re.search(r"note: remat: none, .* per step by simulation; full: ", text)
    assert run(["sweep", *given, f"--workdir={tmp_path}", "--parallel=1"]) == 0
    (row,) = json.loads((tmp_path / "sweep.json").read_text())["candidates"]
    assert f"simulated: {show_seconds(row['seconds'])} per step" in text
    assert re.search(r"\n  peak +(.*?)  of ", text)[1] == show_bytes(row["peak_bytes"])


@pytest.mark.long
def test_training_says_what_it_takes(tmp_path, capsys):
    (tmp_path / "text.txt").write_text("To be, or not to be, that is the question. " * 200)
    tiny = ("--model_args=layers=2,embed=16,heads=2,d_ff=32", "--batch_size=8", "--length=16")
    given = (*tiny, f"--data={tmp_path / 'text.txt'}", "--steps=1", "--hardware=v5p")
    assert run(["train", *given, "--remat=auto"]) == 0
    assert "remat: " in capsys.readouterr().out


def test_it_needs_to_know_the_hardware(capsys):
    assert run(["explain", *GIVEN, "--remat=auto"]) == 2
    assert "--remat=auto decides by time: name the hardware, as in --hardware=v5p" in (
        capsys.readouterr().err
    )
