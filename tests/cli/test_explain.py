"""`meshdsl explain`: the training step of any job, on any mesh, on any machine."""

import jax
import pytest

from meshdsl.cli.main import run

LAYOUT = "--layout=batch:data; heads:model; d_ff:model; vocab:model; length:model?"


def explained(capsys, *arguments):
    code = run(["explain", *arguments])
    captured = capsys.readouterr()
    assert (code, captured.err) == (0, "")
    return captured.out


def test_the_largest_model_on_512_devices_is_explained_and_nothing_is_allocated(capsys):
    held = len(jax.live_arrays())
    report = explained(capsys, "--model=gpt3_175b", "--mesh_shape=data:64,model:8", LAYOUT)
    assert len(jax.live_arrays()) == held
    assert "512 devices" in report
    assert "174.6 B parameters" in report
    assert "blocks/attention/query" in report


def test_collectives_have_the_line_that_they_come_from(capsys):
    report = explained(capsys, "--mesh_shape=data:2,model:4", LAYOUT)
    kinds = {"all_gather", "reduce_scatter", "all_reduce"}
    rows = [line.split() for line in report.splitlines() if line.split()[:1]]
    places = {row[0]: row[-1] for row in rows if row[0] in kinds}
    assert places.keys() == kinds
    assert all(place.rpartition(":")[2].isdigit() for place in places.values())


def test_models_of_volumes_are_explained_as_well(capsys):
    report = explained(
        capsys, "--model=unet3d_mini", "--mesh_shape=rows:8", "--layout=depth:rows", "--length=64"
    )
    assert "batch 4 × depth 64 × height 64 × width 64" in report
    assert "permute" in report and "models/layers/convolution.py:" in report


def test_without_a_mesh_nothing_is_on_the_wire(capsys):
    assert "all_reduce" not in explained(capsys, "--model=gpt_mini")


@pytest.mark.parametrize("flag", ["--batch_size=32", "--length=64", "--clip_norm=0", "--steps=9"])
def test_the_flags_of_train_are_those_of_explain(capsys, flag):
    assert explained(capsys, flag)


def test_the_flags_change_the_job(capsys):
    report = explained(capsys, "--model_args=layers=2", "--batch_size=4", "--length=8")
    assert "batch 4 × length 8" in report
    assert "layers=2" in report


def test_a_policy_is_that_of_the_model(capsys):
    report = explained(capsys, "--policy=params=bfloat16,compute=bfloat16")
    assert "bf16[layers=4, embed=256" in report
