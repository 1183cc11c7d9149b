"""Folders of Hugging Face on the command line: in, through a run, and out again."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file

from meshdsl.cli.main import run
from tests.models.huggingface.folders import CONFIGS, tensors_of, write_folder

BYTES = CONFIGS["llama 2"] | {"vocab_size": 300}
WHEN = ("--steps=1", "--learning_rate=0", "--log_every=1", "--eval_batches=1", "--backend=numpy")
SMALL = ("--batch_size=4", "--length=16")


@pytest.fixture
def text(tmp_path):
    (tmp_path / "text.txt").write_bytes(b"A named dimension is a dimension with a name. " * 200)
    return f"--data={tmp_path}/text.txt"


def test_a_folder_is_trained_and_written_again(capsys, tmp_path, text):
    """Without a learning rate the weights stay, bit for bit."""
    folder = write_folder(tmp_path / "in", BYTES)
    (folder / "tokenizer_config.json").write_text("{}")
    mesh = ("--mesh_shape=data:2,model:2", "--layout=batch:data;heads:model;params/embed:data")
    workdir = f"--workdir={tmp_path}/run"
    assert run(["train", f"--init_from={folder}", text, *SMALL, *WHEN, *mesh, workdir]) == 0
    out = tmp_path / "out"
    capsys.readouterr()
    assert run(["export", workdir, f"--out={out}", "--format=hf"]) == 0
    count = sum(array.size for array in tensors_of(folder).values())
    assert (
        f"{count:,} parameters after step 1 in {out}/model.safetensors" in capsys.readouterr().out
    )
    after = load_file(out / "model.safetensors")
    for name, array in tensors_of(folder).items():
        np.testing.assert_array_equal(after[name], array, err_msg=name)
    settings = json.loads((out / "config.json").read_text())
    assert settings["architectures"] == ["LlamaForCausalLM"] and settings["vocab_size"] == 300
    assert (out / "tokenizer_config.json").read_text() == "{}"

    assert run(["evaluate", f"--init_from={out}", text, *SMALL, "--backend=numpy"]) == 0
    of_folder = capsys.readouterr().out
    assert run(["evaluate", workdir, text, *SMALL, "--backend=numpy"]) == 0
    assert of_folder.strip() in capsys.readouterr().out


def test_a_folder_brings_its_tokenizer(capsys, tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    words = {word: number for number, word in enumerate(["</s>", "a", "named", "dimension"])}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="</s>"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    folder = write_folder(tmp_path / "in", CONFIGS["gpt2"] | {"vocab_size": 4})
    model.save(str(folder / "tokenizer.json"))
    how = ("--max_tokens=3", "--temperature=0", "--backend=numpy")
    assert run(["generate", f"--init_from={folder}", "--prompt=a named", *how]) == 0
    written = capsys.readouterr().out
    assert written.startswith("a named") and {*written.split()} <= {*words}


def test_a_model_that_has_no_family_is_not_written(capsys, tmp_path, text):
    job = ("--model_args=layers=1,embed=16,heads=2", *SMALL, *WHEN)
    assert run(["train", *job, text, f"--workdir={tmp_path}/run"]) == 0
    out = ["export", f"--workdir={tmp_path}/run", "--format=hf"]
    assert run([*out, f"--out={tmp_path}/out"]) == 2
    assert "no family of Hugging Face has such models" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert run([*out, "--out=mine.safetensors"]) == 2
    assert "--format=hf writes a folder: give --out=mine" in capsys.readouterr().err


def test_another_model_than_the_folder_s_is_told(capsys, tmp_path, text):
    folder = write_folder(tmp_path / "in", BYTES)
    assert run(["train", f"--init_from={folder}", "--model=gpt_mini", text, *WHEN]) == 2
    told = capsys.readouterr().err
    assert "blocks/mlp/w_gate: not of the model" in told
