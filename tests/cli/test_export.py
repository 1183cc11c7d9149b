"""`meshdsl export`, and `meshdsl train --init_from`: weights from one run to the next."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import load_file

from meshdsl.cli.checkpointed import begin_token
from meshdsl.cli.main import run
from meshdsl.training.checkpointing.saving import origin_of
from meshdsl.training.checkpointing.stored_params import StoredParams
from meshdsl.training.checkpointing.weights import save_weights
from meshdsl.training.exit_codes import UNFINISHED

SMALL = ("--model_args=layers=1,embed=16,heads=2", "--batch_size=8", "--length=16")
WHEN = ("--log_every=1", "--eval_batches=1", "--learning_rate=0")


@pytest.fixture
def text(tmp_path):
    (tmp_path / "text.txt").write_bytes(b"A named dimension is a dimension with a name. " * 200)
    return f"--data={tmp_path}/text.txt"


def losses(workdir):
    lines = (workdir / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


def test_weights_go_from_a_run_to_another_on_another_mesh(capsys, tmp_path, text):
    """Without a learning rate the weights stay, so the same data have the same losses."""
    mesh = ("--mesh_shape=data:2,model:2", "--layout=batch:data;heads:model;params/embed:data")
    job = [*SMALL, *WHEN, text, "--backend=numpy"]
    assert run(["train", *job, *mesh, "--steps=2", f"--workdir={tmp_path}/a"]) == 0
    capsys.readouterr()
    assert run(["export", f"--workdir={tmp_path}/a", f"--out={tmp_path}/b.safetensors"]) == 0
    count = sum(array.size for array in load_file(tmp_path / "b.safetensors").values())
    told = f"{count:,} parameters after step 2 in {tmp_path}/b.safetensors\n"
    assert capsys.readouterr().out == told
    start = ("train", *job, f"--workdir={tmp_path}/c", f"--init_from={tmp_path}/b.safetensors")
    assert run([*start, "--steps=2"]) == 0
    np.testing.assert_allclose(losses(tmp_path / "c"), losses(tmp_path / "a"), atol=2e-5)
    capsys.readouterr()
    assert run([*start[:-1], "--init_from=gone", "--steps=2"]) == 0
    captured = capsys.readouterr()
    assert "/c/checkpoints/2, and not from the weights gone\n" in captured.out


def test_a_run_keeps_what_it_began_with(capsys, tmp_path, text):
    job = ["train", *SMALL, text, "--backend=numpy", "--eval_every=2", "--steps=2"]
    here, elsewhere = f"--workdir={tmp_path}/a", f"--workdir={tmp_path}/c"
    weights = f"--init_from={tmp_path}/b.safetensors"
    begins = SimpleNamespace(begin=3)

    def token(workdir):
        stored = StoredParams.of(tmp_path / workdir)
        flags = SimpleNamespace(model="gpt_mini", init_from=None, begin_documents=False)
        return begin_token(flags, begins, stored)

    def half(*flags):
        assert run([*job, "--exit_at_step=1", *flags]) == UNFINISHED

    half(here)
    assert run(["export", here, f"--out={tmp_path}/b.safetensors"]) == 0
    half(elsewhere, weights)
    assert (token("a"), token("c")) == (None, 3)
    assert run([*job, here, weights]) == run([*job, elsewhere]) == 0  # they go on
    assert [StoredParams.of(tmp_path / w).folder.name for w in "ac"] == ["2", "2"]
    assert (token("a"), token("c")) == (None, 3)
    assert origin_of(tmp_path / "c") == f"{tmp_path}/b.safetensors"
    (tmp_path / "none").mkdir()
    assert origin_of(tmp_path / "none") is None


def test_a_folder_of_half_precision(capsys, tmp_path, text):
    job = [*SMALL, *WHEN, text, "--backend=numpy", "--steps=1"]
    assert run(["train", *job, f"--workdir={tmp_path}/a"]) == 0
    how = ("--dtype=bfloat16", "--max_shard_size=8kB", "--step=1")
    capsys.readouterr()
    assert run(["export", f"--workdir={tmp_path}/a", f"--out={tmp_path}/b", *how]) == 0
    index = json.loads((tmp_path / "b" / "model.safetensors.index.json").read_text())
    files = set(index["weight_map"].values())
    assert f" in {len(files)} files in {tmp_path}/b\n" in capsys.readouterr().out
    found = [load_file(tmp_path / "b" / file) for file in files]
    assert {a.dtype.name for arrays in found for a in arrays.values()} == {"bfloat16"}
    assert index["metadata"]["total_size"] == sum(a.nbytes for f in found for a in f.values())
    assert run(["train", *job, f"--init_from={tmp_path}/b"]) == 0


def test_mistakes_are_reported(capsys, tmp_path, text):
    def refused(*arguments):
        assert run(arguments) == 2
        return capsys.readouterr().err

    assert refused("export", "--out=a.safetensors", "--max_shard_size=1MB", "--dtype=int4") == (
        "meshdsl export: 3 problems\n\n"
        "  1. --dtype: unknown dtype 'int4'; choose one of bool, int8, int16, int32, int64, uint8, "
        "uint16, uint32, uint64, float8_e4m3fn, float8_e5m2, float16, bfloat16, float32, float64, "
        "complex64, complex128\n"
        "  2. --workdir says whose checkpoint to export, as in --workdir=runs/first\n"
        "  3. --max_shard_size: a.safetensors is one file; give a folder for several\n"
    )
    assert "--out says where to" in refused("export", "--workdir=a")
    assert refused("export", f"--workdir={tmp_path}", "--out=-") == (
        "meshdsl export: --out=-: weights are files; give a folder, or a name as "
        "weights.safetensors\n"
    )
    assert refused("export", f"--workdir={tmp_path}", f"--out={tmp_path}/b") == (
        f"meshdsl export: {tmp_path}/checkpoints has no checkpoint\n"
    )
    save_weights(tmp_path / "mine", {})
    assert "mine is there already, and is not written over; choose another name" in refused(
        "export", f"--workdir={tmp_path}", f"--out={tmp_path}/mine"
    )
    job = ["train", *SMALL, text, "--backend=numpy", "--steps=1"]
    assert refused(*job, f"--init_from={tmp_path}/none") == (
        f"meshdsl train: --init_from: cannot read the weights in {tmp_path}/none\n"
        f"  {tmp_path}/none: there is no such file\n"
    )
    told = refused(*job, f"--init_from={tmp_path}/mine")
    assert told.startswith(
        f"meshdsl train: --init_from: weights {tmp_path}/mine are of another model\n  "
    )
    assert "\n  embedding: missing\n" in told


@pytest.mark.long
def test_averages_go_out_and_are_evaluated(capsys, tmp_path, text):
    job = [*SMALL, "--learning_rate=0.1", "--steps=3", text, "--backend=numpy", "--eval_batches=1"]
    mesh = ("--mesh_shape=data:2,model:2", "--layout=batch:data;heads:model;optimizer/embed:data")
    assert run(["train", *job, *mesh, "--ema_decay=0.9", f"--workdir={tmp_path}/a"]) == 0
    assert run(["train", *job, f"--workdir={tmp_path}/plain"]) == 0
    found = {}
    for name, more in {"params": (), "averages": ("--ema",)}.items():
        out = tmp_path / f"{name}.safetensors"
        assert run(["export", f"--workdir={tmp_path}/a", f"--out={out}", *more]) == 0
        found[name] = load_file(out)
    assert found["params"].keys() == found["averages"].keys()
    assert any((found["params"][n] != found["averages"][n]).any() for n in found["params"])
    assert run(["export", f"--workdir={tmp_path}/plain", f"--out={tmp_path}/p.safetensors"]) == 0
    for name, array in load_file(tmp_path / "p.safetensors").items():
        np.testing.assert_allclose(found["params"][name], array, atol=1e-3)

    def loss(*arguments):
        capsys.readouterr()
        assert run(["evaluate", "--backend=numpy", text, *SMALL, *arguments]) == 0
        return capsys.readouterr().out.splitlines()[-1]

    of_averages = loss(f"--workdir={tmp_path}/a", "--ema")
    assert of_averages == loss(f"--init_from={tmp_path}/averages.safetensors")
    assert of_averages != loss(f"--workdir={tmp_path}/a")
    capsys.readouterr()
    assert run(["export", f"--workdir={tmp_path}/plain", "--ema", f"--out={tmp_path}/none"]) == 2
    assert "/plain/checkpoints/3 has no averages of parameters" in capsys.readouterr().err
    weights = f"--init_from={tmp_path}/p.safetensors"
    assert run(["evaluate", text, *SMALL, weights, "--ema"]) == 2
    assert "--ema: weights have no averages" in capsys.readouterr().err
