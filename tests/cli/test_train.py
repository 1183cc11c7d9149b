"""`meshdsl train`, from text to metrics."""

import json
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from meshdsl.cli.main import run

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


def test_a_job_from_text_to_metrics(capsys, tmp_path, text):
    mesh = ("--mesh_shape=data:2,model:2", "--layout=batch:data;heads:model;vocab:model")
    when = ("--steps=40", "--log_every=20", "--eval_every=20", "--eval_batches=2")
    code = run(
        ["train", *SMALL, *mesh, *when, text, "--host_devices=8", f"--workdir={tmp_path}/run"]
    )
    captured = capsys.readouterr()
    assert (code, captured.err) == (0, "")
    first, *reports, last = captured.out.splitlines()
    assert first == (
        "gpt_mini, mesh data:2 model:2, batches of 8 x 16 tokens, 9,201 bytes of text in 1 file"
    )
    assert [report.split()[1] for report in reports] == ["20/40", "40/40"]
    found = lines(tmp_path / "run")
    assert found[1]["eval_loss"] < found[0]["eval_loss"] < 5.5
    assert last == (
        f"held-out loss {found[1]['eval_loss']:.4f} nats per byte; metrics in {tmp_path}/run"
    )


def test_a_model_of_ones_own_on_the_numpy_backend(capsys, tmp_path, text):
    (tmp_path / "mine.py").write_text(MODEL)
    arguments = (f"--model={tmp_path}/mine.py:tiny", "--backend=numpy", "--policy=float32")
    arguments += ("--microbatches=4", "--remat=keep_collectives", "--bucket_bytes=1MiB")
    code = run(["train", *arguments, *SMALL[1:], text, "--steps=1", "--eval_batches=1"])
    captured = capsys.readouterr()
    assert (code, captured.err) == (0, "")
    assert "held-out loss 5." in captured.out


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


def test_an_interrupted_run_leaves_complete_metrics(tmp_path, text):
    arguments = [*SMALL, text, "--steps=1000000", "--log_every=50", f"--workdir={tmp_path}/run"]
    process = subprocess.Popen(
        [*CONSOLE, "train", *arguments],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    metrics = tmp_path / "run" / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not (metrics.exists() and metrics.read_bytes().count(b"\n") >= 2):
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, message = process.communicate(timeout=60)
    assert process.returncode == 130
    found = lines(tmp_path / "run")
    assert [line["step"] for line in found[:2]] == [50, 100]
    assert message == (
        "\nstopping after this step; Ctrl-C again stops at once\n"
        f"meshdsl train: interrupted after step {found[-1]['step']} of 1000000\n"
    )


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
    _, message = process.communicate(timeout=60)
    assert process.returncode == 130, message
    assert "Traceback" not in message and "interrupted" in message
