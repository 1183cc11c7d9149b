"""`meshdsl train`, from text to metrics."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from meshdsl.cli import flags, train
from meshdsl.cli.main import run
from meshdsl.training.data import data_files, write_token_file
from meshdsl.training.exit_codes import FAILED, FINAL, NOT_FINITE
from meshdsl.training.loop import TrainResult
from tests.layouts.calibrations import MACHINE, be_here, small, written
from tests.training.data.files import write_parquet, write_tokenizer

SMALL = ("--model_args=layers=1,embed=16,heads=2", "--batch_size=8", "--length=16")
CONSOLE = (
    sys.executable,
    "-c",
    "from meshdsl.cli.main import console; raise SystemExit(console())",
)
MODEL = """
from meshdsl.models import load

def tiny():
    return load("gpt_mini", "layers=1,embed=16,heads=2,policy.compute=bfloat16")
"""


def lines(workdir):
    text = (workdir / "metrics.jsonl").read_text()
    assert text.endswith("\n")
    return [json.loads(line) for line in text.splitlines()]


@pytest.fixture
def text(tmp_path):
    (tmp_path / "text.txt").write_bytes(b"A named dimension is a dimension with a name. " * 200)
    return f"--data={tmp_path}/text.txt"


@pytest.mark.long
def test_a_job_from_text_to_metrics(capsys, tmp_path, text):
    mesh = ("--mesh_shape=data:2,model:2", "--layout=batch:data;heads:model;vocab:model")
    when = ("--steps=40", "--log_every=20", "--eval_every=20", "--eval_batches=2")
    code = run(
        ["train", *SMALL, *mesh, *when, text, "--host_devices=8", f"--workdir={tmp_path}/run"]
    )
    captured = capsys.readouterr()
    assert (code, captured.err) == (0, "")
    values, problems = flags.read([f"--config={tmp_path}/run/run.toml"])
    assert (problems.found, values.steps, values.batch_size) == ([], 40, 8)
    first, *reports, spent, last = captured.out.splitlines()
    assert spent.startswith("time: ") and " % compiling" in spent
    assert first == (
        "gpt_mini, mesh data:2 model:2, batches of 8 x 16 tokens, 9,201 bytes of text in 1 file"
    )
    assert [report.split()[1] for report in reports] == ["20/40", "40/40"]
    found = lines(tmp_path / "run")
    assert found[1]["eval_loss"] < found[0]["eval_loss"] < 5.5
    assert last == (
        f"held-out loss {found[1]['eval_loss']:.4f} nats per byte; metrics in {tmp_path}/run"
    )


@pytest.fixture
def here(monkeypatch):
    """Makes this machine the one of the small calibration."""
    be_here(monkeypatch)


@pytest.fixture
def trained(monkeypatch):
    """Returns a list to which each training adds its options, instead of taking its steps."""
    all_options = []

    def train(*arguments, options, **rest):
        all_options.append(options)
        return TrainResult(None, [], [{"eval_loss": 1.0}], 1)

    monkeypatch.setattr("meshdsl.training.train", train)
    return all_options


def test_hardware_that_is_given_decides_by_its_time(tmp_path, text, trained, here):
    path = written(tmp_path)
    for hardware in ("v5p", path):
        assert run(["train", *SMALL, text, "--steps=1", f"--hardware={hardware}"]) == 0
    assert run(["train", *SMALL, text, "--steps=1"]) == 0
    assert [options.hardware for options in trained] == ["v5p", path, None]


def test_a_calibration_of_other_devices_is_refused(capsys, tmp_path, text, trained, here):
    path = written(tmp_path)
    gpu = replace(MACHINE, platform="gpu", device_kind="NVIDIA H100")
    replace(small(), machine=gpu).write(path)
    arguments = ("train", *SMALL, text, "--steps=1", f"--hardware={path}")
    assert run(arguments) == 2
    error = capsys.readouterr().err
    assert (
        "is of another machine or jaxlib (" in error and "kind of device: NVIDIA H100 th" in error
    )
    assert trained == []
    assert run([*arguments, "--override"]) == 0
    assert "warning: " in capsys.readouterr().err and len(trained) == 1


def test_processes_with_other_calibrations_do_not_agree(tmp_path):
    corpus = SimpleNamespace(fingerprint=lambda: "")

    def facts(path):
        values, _ = flags.read([f"--hardware={path}"], "train")
        return train._facts(values, corpus)

    path = written(tmp_path)
    first = facts(path)
    assert first == facts(path) and "the calibration" not in facts("v5p")
    small().with_family("sharing", {(1,): 1.0}).write(path)
    different = {name for name, fact in facts(path).items() if fact != first[name]}
    assert different == {"the calibration"}


def test_a_model_of_ones_own_on_the_numpy_backend(capsys, tmp_path, text):
    (tmp_path / "mine.py").write_text(MODEL)
    arguments = (f"--model={tmp_path}/mine.py:tiny", "--backend=numpy", "--policy=float32")
    arguments += ("--microbatches=4", "--remat=keep_collectives", "--bucket_bytes=1MiB")
    code = run(["train", *arguments, *SMALL[1:], text, "--steps=1", "--eval_batches=1"])
    captured = capsys.readouterr()
    assert (code, captured.err) == (0, "")
    assert "held-out loss 5." in captured.out


@pytest.mark.long
def test_half_precision_with_all_that_goes_with_it(capsys, tmp_path, text):
    mesh = ("--mesh_shape=data:2,model:2", "--layout=batch:data;heads:model;params/embed:data")
    how = ("--policy=compute=float16", "--initial_loss_scale=1048576", "--loss_scale_window=20")
    more = ("--extra_metrics=num_zeros,params_norm", "--remat=names:attention_out,mlp_hidden")
    rate = ("--schedule=wsd", "--decay_steps=5", "--weight_decay_except=embedding")
    when = ("--steps=40", "--log_every=20", "--eval_every=40", "--eval_batches=2")
    arguments = [*SMALL, *mesh, *how, *more, *rate, *when, text, "--backend=numpy"]
    code = run(["train", *arguments, f"--workdir={tmp_path}/run"])
    assert (code, capsys.readouterr().err) == (0, "")
    first, last = lines(tmp_path / "run")
    assert last["loss"] < first["loss"] and last["eval_loss"] < 5.5
    assert 1 <= first["skipped_steps"] <= last["skipped_steps"] < 20
    assert all(line["params_norm"] > 1 and line["num_zeros"] >= 0 for line in (first, last))
    assert np.log2(last["loss_scale"]) % 1 == 0 and last["loss_scale"] < 2**20
    assert "first_nonfinite" not in last


@pytest.mark.long
def test_a_step_that_is_not_finite_has_an_exit_code_of_its_own(capsys, text):
    """One that fails may go on if it is started again; this one would end in the same step."""
    apart = ("--learning_rate=1e30", "--warmup_steps=0", "--clip_norm=0", "--steps=8")
    code = run(["train", *SMALL, *apart, text, "--log_every=4", "--eval_batches=1"])
    assert code == NOT_FINITE == 65 and code in FINAL and FAILED not in FINAL
    assert "not finite" in capsys.readouterr().err


@pytest.mark.long
def test_an_interrupted_run_leaves_complete_metrics(tmp_path, text):
    arguments = [*SMALL, text, "--steps=1000000", "--log_every=50", f"--workdir={tmp_path}/run"]
    process = subprocess.Popen(
        [*CONSOLE, "train", *arguments],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    metrics = tmp_path / "run" / "metrics.jsonl"
    deadline = time.monotonic() + 300
    while not (metrics.exists() and metrics.read_bytes().count(b"\n") >= 2):
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, message = process.communicate(timeout=300)
    assert process.returncode == 130
    found = lines(tmp_path / "run")
    assert [line["step"] for line in found[:2]] == [50, 100]
    assert message == (
        "\nstopping after this step; Ctrl-C again stops at once\n"
        f"meshdsl train: interrupted after step {found[-1]['step']} of 1000000\n"
    )


@pytest.mark.long
@pytest.mark.parametrize("output", ["nobody reads it", "it is closed"])
def test_where_nobody_reads_the_run_goes_on_and_its_exit_code_is_reported(output, tmp_path, text):
    when = ("--steps=9", "--log_every=1", "--exit_at_step=3", f"--workdir={tmp_path}/run")
    command = [*CONSOLE, "train", *SMALL, text, *when]
    reader, writer = os.pipe()
    os.close(reader)
    if output == "it is closed":
        command = ["sh", "-c", 'exec "$@" >&-', "sh", *command]
    done = subprocess.run(
        command, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=300, check=False
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (75, "")
    assert [line["step"] for line in lines(tmp_path / "run")] == [1, 2, 3]
    assert (tmp_path / "run" / "checkpoints" / "3").is_dir()


def test_an_interrupt_before_the_first_step_ends_the_run_at_once(text):
    """While it compiles: no traceback, no crash at exit."""
    process = subprocess.Popen(
        [*CONSOLE, "train", *SMALL, text, "--steps=1000000"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert "gpt_mini, unsharded" in process.stdout.readline()
    process.send_signal(signal.SIGINT)
    _, message = process.communicate(timeout=300)
    assert process.returncode == 130, message
    assert "Traceback" not in message and "interrupted" in message


@pytest.mark.long
def test_packed_documents_of_a_mixture_are_split_and_read_by_workers(capsys, tmp_path):
    """The losses are those without workers and with a cache of tokens, to the last digit."""
    tokenizer = write_tokenizer(tmp_path / "t.json")
    write_parquet(tmp_path / "a.parquet", body=["a named dim of a tensor"] * 150)
    write_token_file(tmp_path / "b.bin", [np.arange(n % 7 + 2) % 6 for n in range(150)])
    data = (f"--data={tmp_path}/*.parquet:0.7,{tmp_path}/b.bin:0.3", "--data_column=body")
    how = (f"--tokenizer={tokenizer}", "--split=8,1,1", "--packing", "--eval_batches=1")
    small = ("--model_args=layers=1,embed=16,heads=2,vocab=6", "--batch_size=4", "--length=12")
    found = []
    for name, more in [("a", ("--data_workers=1",)), ("b", (f"--data_cache={tmp_path}/cache",))]:
        workdir = (f"--workdir={tmp_path}/{name}", "--steps=4", "--log_every=1", "--backend=numpy")
        code = run(["train", *small, *data, *how, *workdir, *more])
        captured = capsys.readouterr()
        assert (code, captured.err) == (0, "")
        first, *_, last = captured.out.splitlines()
        assert first == (
            "gpt_mini, unsharded, batches of 4 x 12 tokens, 1,794 tokens of text in 2 files"
        )
        assert "nats per token, test loss " in last and "; metrics in" in last
        found.append([(line["loss"], line.get("eval_loss")) for line in lines(tmp_path / name)])
    assert found[0] == found[1]
    assert sorted(path.suffix for path in (tmp_path / "cache").iterdir()) == [
        ".bin",
        ".idx",
        ".key",
        ".sums",
    ]


@pytest.mark.long
def test_a_run_goes_on_with_a_cache_of_tokens_or_without(capsys, tmp_path, text):
    command = ["train", *SMALL, text, "--steps=4", "--backend=numpy", f"--workdir={tmp_path}/run"]
    cache = f"--data_cache={tmp_path}/cache"
    for step, more in enumerate([[], [cache], [], [cache]], 1):
        code = run([*command, f"--exit_at_step={step}", *more])
        assert code == (0 if step == 4 else 75), capsys.readouterr().err
    assert lines(tmp_path / "run")[-1]["step"] == 4


def test_without_a_part_to_validate_with_the_training_loss_is_reported(capsys, text):
    arguments = [*SMALL, text, "--steps=2", "--split=1,0", "--backend=numpy"]
    assert run(["train", *arguments]) == 0
    assert "\ntraining loss 5." in capsys.readouterr().out


def refused(capsys, *arguments):
    assert run(["train", *SMALL, *arguments]) == 2
    return capsys.readouterr().err


def test_a_tokenizer_that_does_not_fit_the_model_is_reported_at_start(capsys, tmp_path, text):
    tokenizer = write_tokenizer(tmp_path / "t.json", ids=[0, 1, 2, 3, 4, 999])
    assert refused(capsys, text, f"--tokenizer={tokenizer}") == (
        f"meshdsl train: --tokenizer: {tokenizer} makes tokens of a vocabulary of 1,000, but "
        "gpt_mini has 256: take the tokenizer of the model, or --model_args=vocab=1000\n"
    )
    small = "--model_args=layers=1,embed=16,heads=2,vocab=100"
    assert refused(capsys, text, small) == (
        "meshdsl train: --model: gpt_mini has a vocabulary of 100, but text is bytes and needs "
        "256: --model_args=vocab=256\n"
    )
    write_token_file(tmp_path / "a.bin", [np.arange(120)])
    assert refused(capsys, f"--data={tmp_path}/a.bin", small) == (
        "meshdsl train: --data: cannot read the data (1 problem)\n"
        "\n"
        f"  1. {tmp_path}/a.bin: token 100 has the id 100, outside of the vocabulary of 100; the "
        "data was made with another tokenizer, or the file is damaged\n"
    )


def test_a_model_that_packs_nothing_is_reported(capsys, tmp_path, text):
    (tmp_path / "mine.py").write_text(
        "from dataclasses import replace\n"
        + MODEL.replace("return load(", "return replace(load(").replace(
            '16")', '16"), packed=False)'
        )
    )
    assert refused(
        capsys, text, f"--model={tmp_path}/mine.py:tiny", "--model_args=", "--packing"
    ) == (
        f"meshdsl train: --packing: the loss of {tmp_path}/mine.py:tiny does not take the "
        "`segments` and `positions` of packed documents\n"
    )


def test_weights_for_some_of_the_data_are_reported_with_other_mistakes(capsys, tmp_path):
    told = refused(capsys, "--data=a.txt:1,b.txt", "--end_token=</s>", "--layout=batch:data")
    assert told.startswith("meshdsl train: 2 problems\n\n  1. --data: `b.txt` has no weight, but")
    assert "\n  2. --layout needs a mesh" in told


@pytest.mark.long
def test_a_damaged_cache_of_tokens_ends_a_run_also_a_large_one(capsys, tmp_path, text, monkeypatch):
    command = ["train", *SMALL, text, "--steps=200", f"--data_cache={tmp_path}/cache"]
    assert run([*command[:-2], "--steps=1", command[-1]]) == 0
    (cache,) = (tmp_path / "cache").glob("*.bin")
    cache.write_bytes(bytes([65]) * cache.stat().st_size)
    for at_start in (2**28, 100):
        monkeypatch.setattr(data_files, "_AT_START", at_start)
        capsys.readouterr()
        assert run(command) == 2
        message = capsys.readouterr().err
        assert f"{cache} has other bytes than before" in message
        assert f"damaged: delete {cache}, and it is built again" in message
