"""`meshdsl serve`: the command line of the server; tests/generation/serving has what it answers."""

import json
import os
import signal
import socket
import subprocess
import sys
import urllib.request

import pytest

from meshdsl.cli.main import run
from tests.docs.pages import ROOT

MODEL = "--model_args=layers=1,embed=16,heads=2"  # in float32: layouts round alike
JOB = (MODEL, "--batch_size=8", "--length=16", "--backend=numpy", "--steps=2", "--eval_batches=1")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    (folder / "text.txt").write_bytes(b"A named dimension is a dimension with a name. " * 200)
    assert run(["train", *JOB, f"--data={folder}/text.txt", f"--workdir={folder}/run"]) == 0
    return folder / "run"


@pytest.fixture
def started(trained, tmp_path):
    """Returns a function from more flags to the address of a server; it is stopped at the end."""
    pytest.importorskip("uvicorn")
    processes = []

    def start(*flags):
        command = [sys.executable, "-m", "meshdsl", "serve", f"--workdir={trained}", "--port=0"]
        paths = os.pathsep.join(path for path in sys.path if path)
        processes.append(
            subprocess.Popen(
                [*command, "--batch_size=2", "--length=64", "--backend=numpy", *flags],
                env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{paths}"},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
        return processes[-1], processes[-1].stdout.readline()

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def post(address, path, body):
    body = json.dumps(body).encode()
    request = urllib.request.Request(address + path, body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


@pytest.mark.long
def test_a_run_is_served_and_writes_what_generate_writes(started, trained, capsys, tmp_path):
    template = tmp_path / "chat.jinja"
    template.write_text("{{ messages[0].content }}")
    mesh = ("--mesh_shape=model:2", "--layout=heads:model")
    process, line = started(f"--chat_template={template}", *mesh)
    assert line.startswith("run answers at http://127.0.0.1:"), process.stderr.read()
    assert line.endswith(
        "/v1: 2 texts at once, of 64 tokens each (16.0 KiB); 64 more may wait. Ctrl-C ends it\n"
    )
    address = line.split()[3].rstrip(":")
    body = {"model": "run", "max_tokens": 20, "temperature": 0.8, "top_k": 50, "seed": 4}
    written = post(address, "/completions", body | {"prompt": "A named"})["choices"][0]["text"]
    capsys.readouterr()
    sampled = ("--max_tokens=20", "--temperature=0.8", "--top_k=50", "--seed=4")
    assert (
        run(["generate", f"--workdir={trained}", "--prompt=A named", "--backend=numpy", *sampled])
        == 0
    )
    assert capsys.readouterr().out == f"A named{written}\n"
    chat = body | {"messages": [{"role": "user", "content": "A named"}]}
    answer = post(address, "/chat/completions", chat)["choices"][0]["message"]
    assert answer == {"role": "assistant", "content": written, "refusal": None}
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) == 130
    assert process.stderr.read() == "\nmeshdsl: interrupted\n"


def refused(capsys, *arguments):
    capsys.readouterr()
    assert run(["serve", "--backend=numpy", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    return err.removeprefix("meshdsl serve: ").rstrip("\n")


@pytest.mark.long
def test_texts_share_pages(started):
    process, line = started("--cache_tokens=80", "--batch_size=4")
    assert "4 texts at once, of 64 tokens each, 80 together (10.0 KiB); 64" in line, process.stderr
    address = line.split()[3].rstrip(":")
    body = {"prompt": "A named dimension", "max_tokens": 40, "temperature": 0, "n": 4}
    texts = [choice["text"] for choice in post(address, "/completions", body)["choices"]]
    assert len(texts) == 4
    assert len(set(texts)) == 1
    with urllib.request.urlopen(address.removesuffix("/v1") + "/health", timeout=60) as answer:
        counts = {"running": 0, "waiting": 0, "pages": 5, "free_pages": 5}
        assert json.load(answer) == {"status": "ok", **counts}


def test_mistakes_are_reported_together(capsys, trained, tmp_path):
    pytest.importorskip("uvicorn")
    text = refused(capsys, "--layout=batch:data", f"--chat_template={tmp_path}/none.jinja")
    assert "--workdir says whose checkpoint to use" in text
    assert "--layout needs a mesh" in text
    assert "none.jinja cannot be read" in text
    learned = f"{MODEL},positions=learned,max_length=32"
    text = refused(capsys, f"--workdir={trained}", learned, "--length=33")
    assert "--length=33: gpt_mini has positions for 32 tokens; take --length=32" in text
    text = refused(capsys, f"--workdir={trained}", "--length=200", "--cache_tokens=100")
    assert text == (
        "--cache_tokens=100 --length=200: a cache of 112 tokens has no room for a text of 200: it "
        "needs 208, in pages of 16"
    )
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        text = refused(capsys, f"--workdir={trained}", f"--port={port}")
    assert text == f"cannot listen on --host=127.0.0.1 --port={port}: Address already in use"
    assert (
        "cannot listen on --host=203.0.113.1 --port=0: Cannot assign requested address"
        in refused(capsys, f"--workdir={trained}", "--port=0", "--host=203.0.113.1")
    )


def test_what_is_not_installed_is_named(capsys, trained, monkeypatch):
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert refused(capsys, f"--workdir={trained}") == (
        "`serve` needs Starlette and Uvicorn: pip install 'meshdsl[serve]'"
    )
