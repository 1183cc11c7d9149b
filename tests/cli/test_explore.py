"""`meshdsl explore`: its plans are those of `explain`, and what it says where there are none."""

import base64
import gzip
import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from meshdsl.cli import main
from meshdsl.cli.exploring.computing import Computer
from meshdsl.reports.explore import packing
from meshdsl.reports.explore import page as pages
from tests.cli.exploring.served import send
from tests.docs.pages import ROOT

TINY = f"--model={Path(__file__).with_name('tiny_mlp.py')}:mlp"
SMALL = "--model=gpt_mini", "--model_args=layers=2,embed=32,heads=4,d_ff=64"
GIVEN = "--mesh_shape=data:2,model:2", "--layout=batch:data; heads:model"
ONE = "--parallel=1"


def data_of(page):
    """Returns the plans of a page."""
    (text,) = re.findall(r'<script type="application/gzip\+base64"[^>]*>([^<]*)</script>', page)
    return json.loads(gzip.decompress(base64.b64decode(text)))


@pytest.fixture
def explored(tmp_path, capsys):
    """Returns a function that runs the command and returns its page, its plans and its words."""

    def run(*arguments):
        path = tmp_path / "explore.html"
        assert main.run(["explore", *arguments, f"--html={path}"]) == 0
        page = path.read_text()
        return page, data_of(page), capsys.readouterr().out

    return run


def flags_of(data, row):
    mesh, layout, remat = (data["texts"][row[n]] for n in (0, 1, 3))
    found = [f"--mesh_shape={mesh.replace(' ', ',')}", f"--layout={layout}"]
    found += [f"--microbatches={row[2]}"] if row[2] > 1 else []
    return found + ([f"--remat={remat}"] if remat else [])


def explained(capsys, *arguments):
    assert main.run(["explain", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def check(data, row, expected):
    """Checks that a plan of a page has the figures and details of `explain --json`."""
    figures, details = row[4], row[5]
    for name, value in zip(data["fields"], figures, strict=False):
        assert value == expected[name], name
    limit, memory, waits = figures[len(data["fields"]) :]
    assert data["texts"][limit] == expected["limit"]
    assert dict(zip(data["parts"], memory, strict=True)) == expected["memory"]
    assert [one[1] for one in waits] == [one["seconds"] for one in expected["waits"]]
    sent = [
        (data["texts"][data["collectives"][kind][1]], count, payload, wire)
        for kind, count, payload, wire in details[0]
    ]
    assert sent == [
        (one["collective"], one["count"], one["payload_bytes"], one["wire_bytes"])
        for one in expected["sent"]
    ]
    inputs = [data["tensors"][number] for number in data["lists"][details[1]]]
    assert [
        (data["texts"][path], bytes, [dim[2] for dim in dims])
        for _, path, _, _, bytes, dims in inputs
    ] == [
        (one["path"], one["bytes"], [dim["local"] for dim in one["dims"]])
        for one in expected["inputs"]
    ]
    seconds = sum(one[1] for one in details[4])
    assert seconds == pytest.approx(expected["at_peaks"]["seconds"], rel=1e-5)


@pytest.mark.long
def test_the_figures_of_plans_are_those_of_explain(explored, capsys):
    given = *SMALL, "--batch_size=8", "--length=16", "--hardware=h100"
    _, data, _ = explored(*given, *GIVEN, ONE, "--plans=16")
    plans = [row for row in data["plans"] if not isinstance(row[4], int)]
    assert len(plans) == 16
    in_parts = [row for row in plans if row[2] > 1]
    recomputing = [row for row in plans if data["texts"][row[3]]]
    for row in (*plans[::6], in_parts[-1], recomputing[-1]):
        check(data, row, explained(capsys, *given, *flags_of(data, row)))


@pytest.mark.long
def test_the_plans_of_the_user_come_first_in_any_number_of_processes(explored):
    layouts = GIVEN[1].replace("heads", "d_ff"), "--layout=batch:data; embed:model"
    given = TINY, GIVEN[0], *layouts, "--plans=12"
    page, data, _ = explored(*given, "--parallel=2")
    first = [data["texts"][row[1]] for row in data["plans"] if not isinstance(row[4], int)][:2]
    assert first == ["batch:data; d_ff:model", "batch:data; embed:model"]
    assert explored(*given, ONE)[0] == page


def test_the_fastest_that_fits_is_told_with_its_flags(explored, capsys):
    given = TINY, "--hardware=v5e"
    _, data, out = explored(*given, "--mesh_shape=data:4", ONE, "--plans=9")
    plans = [row for row in data["plans"] if not isinstance(row[4], int)]
    best = min(plans, key=lambda row: row[4][0])
    assert out.startswith(f"{len(plans)} plans; the fastest that fits: ")
    assert " ".join(flags_of(data, best)[:1]) in out
    assert "is written" in out


def test_a_topology_needs_no_mesh(explored):
    _, data, _ = explored(TINY, "--topology=v5e:2x2", ONE, "--plans=6")
    assert "v5e" in data["machine"]
    assert any("--hardware=v5e" in word for word in data["command"])


@pytest.mark.long
def test_a_flag_of_the_step_holds_for_all_plans(explored, capsys):
    given = *SMALL, "--batch_size=8", "--length=16", "--remat=full"
    _, data, _ = explored(*given, *GIVEN, ONE, "--plans=5")
    row = next(row for row in data["plans"] if not isinstance(row[4], int))
    expected = explained(capsys, *given, *flags_of(data, row))
    assert row[4][0] == expected["seconds"]
    assert {data["texts"][row[3]] for row in data["plans"]} <= {"", "full"}


def test_ctrl_c_keeps_what_is_done(explored, monkeypatch):
    compute, done = Computer.values, []

    def interrupted(self, choice):
        done.append(choice)
        if len(done) == 4:
            os.kill(os.getpid(), signal.SIGINT)
        return compute(self, choice)

    before = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(Computer, "values", interrupted)
    _, data, out = explored(TINY, "--mesh_shape=data:2,model:2", ONE, "--plans=30")
    assert sum(1 for row in data["plans"] if not isinstance(row[4], int)) == 4 == len(done)
    assert "stopped early: 4 of 30 plans were computed" in out
    assert signal.getsignal(signal.SIGINT) is before


def test_a_plan_that_fails_leaves_the_others(explored, monkeypatch):
    compute = Computer.values

    def failing(self, choice):
        if choice.layout == "batch:data":
            raise RuntimeError("no such luck")
        return compute(self, choice)

    monkeypatch.setattr(Computer, "values", failing)
    _, data, out = explored(TINY, "--mesh_shape=data:4", "--layout=batch:data", ONE, "--plans=6")
    reasons = [data["texts"][row[4]] for row in data["plans"] if isinstance(row[4], int)]
    assert any("no such luck" in reason for reason in reasons)
    assert "no plan: --mesh_shape=data:4 --layout=batch:data: " in out


@pytest.fixture
def live():
    """Returns a function that starts `explore --live`, and returns the process and its port."""
    pytest.importorskip("uvicorn")
    processes = []

    def start(*arguments):
        paths = os.pathsep.join(path for path in sys.path if path)
        command = [sys.executable, "-m", "meshdsl", "explore", "--live", ONE, *arguments]
        process = subprocess.Popen(
            command,
            env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{paths}"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        processes.append(process)
        for line in process.stdout:
            if found := re.search(r"the page is at http://127\.0\.0\.1:(\d+)/", line):
                return process, int(found[1])
        raise AssertionError(process.stderr.read())

    yield start
    for process in processes:
        process.kill()
        process.communicate()


@pytest.mark.long
def test_live_answers_what_was_not_computed_ahead_with_the_figures_of_explain(
    live, capsys, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    given = TINY, "--hardware=h100"
    process, port = live(*given, "--mesh_shape=data:2,model:2", "--plans=1")
    data = data_of(send(port, "/")[1].decode())
    assert len(data["plans"]) == 1
    assert data["command"] == [TINY, "--hardware=h100"]
    offered = data["live"]
    for mesh, layout, microbatches in [
        ("data:2 model:2", "batch:data; d_ff:model; embed:model?", 1),
        ("replica:4", "batch:replica; params/d_ff:replica", offered["microbatches"][1]),
    ]:
        asked = {"mesh": mesh, "layout": layout, "microbatches": microbatches, "remat": ""}
        status, read, _ = send(port, "/plan", asked)
        assert status == 200
        answer = json.loads(read)
        (row,) = answer["plans"]
        flags = [f"--mesh_shape={mesh.replace(' ', ',')}", f"--layout={layout}"]
        flags += [f"--microbatches={microbatches}"] if microbatches > 1 else []
        assert flags == flags_of(answer, row)
        check(answer, row, explained(capsys, *given, *flags))
    status, read, _ = send(port, "/plan", {**asked, "layout": "btach:replica"})
    assert status == 200 and "Did you mean `batch`?" in read.decode()
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) == 130
    assert process.stderr.read().endswith("\nmeshdsl: interrupted\n")
    assert [*tmp_path.iterdir()] == []  # without --html, it writes no page


def test_live_says_what_is_missing_or_taken(capsys, monkeypatch):
    pytest.importorskip("uvicorn")
    given = ["explore", "--live", TINY, "--mesh_shape=data:2", "--plans=1", ONE]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main.run([*given, f"--port={port}"]) == 2
    says = f"cannot listen on --port={port}: Address already in use"
    assert says in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert main.run(given) == 2
    says = "`explore --live` needs Starlette and Uvicorn: pip install 'meshdsl[serve]'"
    assert says in capsys.readouterr().err


def test_without_any_plan_it_is_an_error(tmp_path, monkeypatch, capsys):
    def failing(self, choice):
        raise ValueError("nothing fits")

    monkeypatch.setattr(Computer, "values", failing)
    page = tmp_path / "a.html"
    given = ["explore", TINY, "--mesh_shape=data:2", ONE, "--plans=2", f"--html={page}"]
    assert main.run(given) == 2
    assert re.search("no plan could be computed: .*nothing fits", capsys.readouterr().err, re.S)
    assert not page.exists()


@pytest.mark.long
def test_the_page_says_how_many_plans_are_without_details(explored, monkeypatch):
    given = TINY, "--mesh_shape=data:2,model:2", ONE, "--plans=40"
    whole, _, _ = explored(*given)
    limit = len(whole.encode()) - 3000
    monkeypatch.setattr(pages, "MOST_BYTES", limit)
    page, data, out = explored(*given)
    assert len(page.encode()) <= limit
    plans = [row for row in data["plans"] if not isinstance(row[4], int)]
    bare = sum(1 for row in plans if not row[5])
    assert bare and f"{bare} of them are on the page without details" in out
    assert all(data["plans"][number][5] for number in data["front"])
    assert tuple(data["fields"]) == packing.FIGURES


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "--topology says what to plan for"),
        (["--mesh_shape=data:1"], "nothing can be split over 1 device: give --mesh_shape"),
        (["--mesh_shape=data:2", "--plans=10001"], "--plans: at most 10,000, got 10,001"),
        (["--mesh_shape=data:2", "--plans=0"], "--plans"),
        (["--mesh_shape=data:2", "--mesh_shape=data:4"], "data:4 does not have 2"),
        (["--mesh_shape=data:2", "--layout=btach:data"], "Did you mean `batch`?"),
        (["--mesh_shape=data:2", "--layout=batch"], "--layout"),
        (["--mesh_shape=data:2", "--compare_layout=batch:data"], "a second --layout"),
        (["--mesh_shape=data:2", "--hardware=abacus"], "abacus"),
        (["--mesh_shape=data:2", "--live", "--host=0.0.0.0"], "answers this machine alone"),
    ],
)
def test_mistakes_are_explained(arguments, says, tmp_path, capsys):
    given = ["explore", TINY, f"--html={tmp_path / 'a.html'}", "--plans=2", ONE, *arguments]
    assert main.run(given) == 2
    assert says in capsys.readouterr().err
