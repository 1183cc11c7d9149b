"""What needs no data to be seen to be wrong is reported before it is read, all of it at once."""

import numpy as np
import pytest
from safetensors.numpy import save_file

from meshdsl.cli import main
from meshdsl.training.data import Corpus

SMALL = ("--model_args=layers=1,embed=16,heads=2,kv=8,d_ff=16", "--batch_size=2", "--length=8")


@pytest.fixture
def data(tmp_path):
    file = tmp_path / "text.txt"
    file.write_text("some text, " * 100)
    return f"--data={file}"


@pytest.fixture
def told(monkeypatch, capsys, data):
    """Returns what a command says that must end before it reads its data."""

    def forbidden(*_, **__):
        raise AssertionError("the data is read")

    def run(*arguments):
        monkeypatch.setattr(Corpus, "read", forbidden)
        assert main.run(["train", data, *SMALL, *arguments]) == 2
        return capsys.readouterr().err

    return run


def test_all_that_is_wrong_is_reported_before_the_data_is_read(told, tmp_path):
    (tmp_path / "file").write_text("")
    message = told(
        "--steps=5",
        "--steps_per_call=2",
        "--mesh_shape=data:512",
        f"--workdir={tmp_path / 'file' / 'work'}",
        f"--init_from={tmp_path / 'none.safetensors'}",
    )
    assert "4 problems" in message
    assert "--steps_per_call=2: so many steps are done at once, which do not divide --steps=5" in (
        message
    )
    assert "--mesh_shape: mesh data:512 needs 512 devices, but this machine has" in message
    assert f"--workdir: {tmp_path / 'file'} is a file, not a folder; choose another" in message
    assert "--init_from: cannot read the weights in" in message and "no such file" in message


def test_weights_of_another_model_are_reported_before_the_data_is_read(told, tmp_path):
    save_file({"embedding": np.zeros((3, 2), "f4")}, tmp_path / "weights.safetensors")
    message = told(f"--init_from={tmp_path / 'weights.safetensors'}")
    assert "--init_from: " in message and "embedding" in message


@pytest.mark.long
def test_settings_that_differ_from_the_checkpoint_are_reported_before_the_data_is_read(
    told, data, tmp_path, capsys
):
    work = f"--workdir={tmp_path / 'work'}"
    assert main.run(["train", data, *SMALL, work, "--steps=1", "--eval_batches=1"]) == 0
    capsys.readouterr()
    message = told(work, "--steps=2", "--seed=7")
    assert "checkpoints/1 is of a job with other settings; give them again" in message
    assert "  seed: 0 in the checkpoint, 7 here" in message
    assert "  steps: 1 in the checkpoint, 2 here" in message
    assert "begin with the final steps, and stop early with --exit_at_step" in message
    assert "  optimizer: adamw in the checkpoint, lion here" in told(work, "--optimizer=lion")
    assert "optimizer" not in told(work, "--optimizer=adamw", "--steps=2")
    assert "--exit_at_step" not in told(work, "--steps=1", "--seed=7")
    assert "--noresume: " in told(work, "--steps=1", "--noresume")


@pytest.mark.long
def test_arrays_of_another_size_are_reported_before_the_data_is_read(told, data, tmp_path, capsys):
    work = f"--workdir={tmp_path / 'work'}"
    assert main.run(["train", data, *SMALL, work, "--steps=1", "--eval_batches=1"]) == 0
    capsys.readouterr()
    larger = "--model_args=layers=1,embed=24,heads=2,kv=8,d_ff=16"
    message = told(work, larger, "--steps=1", "--override")
    assert "checkpoints/1 is of another model" in message
    assert "params/final_norm/scale: f32[embed=16] in the checkpoint, f32[embed=24] here" in message
