"""`meshdsl sweep`: many layouts in one ranked table, in parallel, resumed, whatever fails."""

import csv
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
import warnings
from importlib.util import find_spec
from pathlib import Path

import pytest

from meshdsl.cli import flags
from meshdsl.cli import job as jobs
from meshdsl.cli.main import run
from meshdsl.cli.planning.steps import checked_program, jitted_step
from meshdsl.cli.sweeping.measures import Asked, Setup, Subject, by_compiling
from meshdsl.cli.sweeping.nearest import nearest
from meshdsl.lowering.costs.units import show_bytes, show_seconds
from meshdsl.lowering.program import SpmdProgram
from meshdsl.reports.explain import explain
from meshdsl.reports.sweeps.candidates import Candidate
from meshdsl.reports.sweeps.ranking import ranked
from meshdsl.reports.sweeps.result import Result
from meshdsl.reports.sweeps.store import FILE

TINY = ("--model_args=layers=2,embed=32,heads=4,d_ff=64", "--batch_size=8", "--length=16")
MESHES = ("--mesh_shape=data:{4,2},model:2", "--mesh_shape=data:8")
LAYOUTS = (
    "--layout=batch:data; heads:{model,-}; d_ff:model",
    "--layout=batch:data{,; params/embed:data}",
    "--layout=batch:data; hedas:data",
)
ON_GPUS = ("--mesh_shape=data:8", "--layout=batch:data")
GOOD = 10  # of 15 candidates; `model` is no axis of data:8, and no dim is called hedas
FILES = ("sweep.csv", "sweep.json", "plot.svg", "index.html")
MODEL = """
import multiprocessing, os, pathlib, signal, time
import meshdsl as md
from meshdsl import nn
from meshdsl.models import Model

vocab, embed = md.dims(vocab=256, embed=8)
DEADLY, HELD = (pathlib.Path(__file__).with_name(name) for name in ("deadly", "held"))
ROWS = pathlib.Path(__file__).with_name("work") / "FILE"


def init(key):
    return {"embedding": nn.initializers.normal(0.02)(key, [vocab, embed])}


def loss(params, batch):
    if multiprocessing.parent_process() and DEADLY.exists():
        DEADLY.unlink()
        os.kill(os.getpid(), signal.SIGKILL)
    while HELD.exists() and ROWS.exists() and ROWS.read_bytes().count(b"\\n") >= 3:
        time.sleep(0.01)
    x = md.take(params["embedding"], batch["tokens"], "vocab")
    logits = md.einsum(x, params["embedding"], over="embed")
    return md.mean(nn.softmax_cross_entropy(logits, batch["targets"], over="vocab"))


tiny = Model("tiny", init, loss, batch_size=4, length=8)
""".replace("FILE", FILE)


def swept(capsys, *arguments, code=0):
    found = run(["sweep", *arguments])
    captured = capsys.readouterr()
    assert found == code, captured.err
    return captured.out if code == 0 else captured.err


def rows_of(folder):
    return json.loads((Path(folder) / "sweep.json").read_text())["candidates"]


def keys_in(folder):
    return [json.loads(line)["key"] for line in (Path(folder) / FILE).read_text().splitlines()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Returns the workdir of a sweep by two processes."""
    folder = tmp_path_factory.mktemp("sweep")
    assert run(["sweep", *TINY, *MESHES, *LAYOUTS, "--parallel=2", f"--workdir={folder}"]) == 0
    return folder


@pytest.mark.long
def test_every_candidate_is_a_row_with_the_figures_of_its_explanation(folder):
    rows = rows_of(folder)
    assert len({(row["mesh"], row["layout"]) for row in rows}) == len(rows) == 15
    measured = [row for row in rows if not row["reason"]]
    assert len(measured) == GOOD
    for row in measured[::3]:
        given = [*TINY, f"--mesh_shape={row['mesh']}", f"--layout={row['layout']}"]
        program = checked_program(*jitted_step(jobs.build(*flags.read(given))))
        report = explain(program, "v5p")
        assert row["seconds"] == row["estimated_seconds"] == report.simulated.seconds
        assert row["overlapped_seconds"] == report.timeline.overlapped_seconds
        assert row["peak_bytes"] == report.memory.peak_bytes
        assert sum(row["wire_bytes"].values()) == pytest.approx(report.wire_bytes)
        page = (folder / row["page"]).read_text()
        assert f"<title>train_step on {row['mesh']}</title>" in page
        assert page.startswith("<!doctype html>")


@pytest.mark.long
def test_the_cheapest_that_fits_is_first_and_what_failed_is_last_with_its_reason(folder):
    rows = rows_of(folder)
    costs = [row["seconds"] * row["devices"] for row in rows[:GOOD]]
    assert costs == sorted(costs)
    reasons = {(row["mesh"], row["layout"]): row["reason"] for row in rows[GOOD:]}
    assert len(reasons) == 15 - GOOD
    lost = reasons["data:8", "batch:data; heads:model; d_ff:model"]
    assert "`heads:model` and `d_ff:model` name mesh axis `model`, but the mesh has `data`" in lost
    assert "Did you mean `heads`?" in reasons["data:4 model:2", "batch:data; hedas:data"]


def test_csv_and_page_have_every_row(folder):
    with (folder / "sweep.csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    rows = rows_of(folder)
    for line, row in zip(table, rows, strict=True):
        assert (line["mesh"], line["layout"]) == (row["mesh"], row["layout"])
        assert (line["seconds"] or None) == (row["seconds"] and str(row["seconds"]))
    page = (folder / "index.html").read_text()
    assert all(f'href="{row["page"]}"' in page for row in rows[:GOOD])
    assert (folder / "plot.svg").read_text() in page
    assert len([*(folder / "pages").iterdir()]) == GOOD


@pytest.mark.long
def test_one_process_finds_what_two_do(folder, tmp_path, capsys):
    swept(capsys, *TINY, *MESHES, *LAYOUTS, "--parallel=1", f"--workdir={tmp_path}")
    for name in ("sweep.csv", "plot.svg", "index.html"):
        assert (tmp_path / name).read_text() == (folder / name).read_text()
    assert rows_of(tmp_path) == rows_of(folder)
    assert sorted(keys_in(tmp_path)) == sorted(keys_in(folder))


@pytest.mark.long
def test_a_sweep_goes_on_where_it_was(folder, tmp_path, capsys):
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    file = tmp_path / FILE
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join(lines[:9]) + lines[9][:20])
    for name in FILES:
        (tmp_path / name).unlink()
    told = swept(capsys, *TINY, *MESHES, *LAYOUTS, f"--workdir={tmp_path}", "--parallel=2")
    assert "9 of 15 candidates were measured earlier" in told
    assert file.read_bytes().splitlines(keepends=True)[:9] == lines[:9]
    assert sorted(keys_in(tmp_path)) == sorted(keys_in(folder))
    assert rows_of(tmp_path) == rows_of(folder)


@pytest.mark.long
def test_what_changes_the_step_is_measured_again(folder, tmp_path, capsys):
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    mesh, layout = "--mesh_shape=data:8", "--layout=batch:data"
    where = (f"--workdir={tmp_path}", mesh, layout, "--parallel=1")
    assert "measured earlier" in swept(capsys, *TINY, *where, "--log_every=3")
    assert "measured earlier" not in swept(capsys, *TINY, *where, "--batch_size=16")
    assert len(keys_in(tmp_path)) == 16


def command(*arguments, folder):
    code = "import sys; from meshdsl.cli.main import run; sys.exit(run(sys.argv[1:]))"
    words = [sys.executable, "-c", code, "sweep", *arguments, f"--workdir={folder}"]
    return subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


@pytest.fixture
def own(tmp_path):
    """Returns the flag of a model in a file.

    While there is a file `deadly`, it kills a worker; while there is one `held`, it waits once
    three candidates are measured.
    """
    (tmp_path / "own.py").write_text(MODEL)
    return f"--model={tmp_path / 'own.py'}:tiny"


@pytest.mark.long
def test_a_sweep_that_is_killed_loses_nothing_that_it_had(own, tmp_path, capsys):
    axes = ",".join(f"a{n}:2" for n in range(3))
    many = "batch:{a0,a1,a2}; vocab:{a0,a1,a2}; length:{a0,-}"
    arguments = (own, f"--mesh_shape={axes}", f"--layout={many}", "--parallel=2")
    work = tmp_path / "work"
    (tmp_path / "held").touch()
    with command(*arguments, folder=work) as process:
        file, until = work / FILE, time.monotonic() + 300
        while not file.exists() or file.read_bytes().count(b"\n") < 3:
            assert process.poll() is None and time.monotonic() < until
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
    (tmp_path / "held").unlink()
    had = keys_in(work)
    assert 3 <= len(had) < 18
    told = swept(capsys, *arguments, f"--workdir={work}")
    assert f"{len(had)} of 18 candidates were measured earlier" in told
    keys = keys_in(work)
    assert keys[: len(had)] == had
    assert len(set(keys)) == len(keys) == 18


@pytest.mark.long
def test_a_process_that_is_killed_is_a_row_and_is_tried_again(own, tmp_path, capsys):
    (tmp_path / "deadly").touch()
    arguments = (own, "--mesh_shape=data:2,model:2", "--layout=batch:{data,-}; vocab:{model,-}")
    arguments = (*arguments, "--parallel=1", f"--workdir={tmp_path / 'work'}")
    told = swept(capsys, *arguments)
    assert "was ended by SIGKILL" in told
    rows = rows_of(tmp_path / "work")
    assert [bool(row["reason"]) for row in rows] == [False, False, False, True]
    told = swept(capsys, *arguments)
    assert "3 of 4 candidates were measured earlier" in told and "SIGKILL" not in told


@pytest.mark.long
def test_candidates_are_run_in_turn_and_rounds_go_on(own, tmp_path, capsys):
    arguments = (own, "--measure=run", "--host_devices=2", f"--workdir={tmp_path}")
    arguments += ("--mesh_shape=data:2", "--layout=batch:{data,-}; vocab:-", "--layout=length:nix")
    swept(capsys, *arguments, "--rounds=2")
    lines = [json.loads(line) for line in (tmp_path / FILE).read_text().splitlines()]
    rounds = [line["key"] for line in lines if "round" in line]
    first, second = dict.fromkeys(rounds)
    assert rounds == [first, second, second, first]  # each round begins with another one
    for key in (first, second):
        (result,) = (line["result"] for line in lines if line["key"] == key and "result" in line)
        seconds = [s for line in lines if line["key"] == key for s in line.get("round", ())]
        assert len(seconds) == 6 and min(seconds) > 0
        assert result["seconds"] == statistics.median(seconds)
        low, high = result["quartiles"]
        assert min(seconds) <= low <= result["seconds"] <= high <= max(seconds)
        assert result["estimated_seconds"] < result["seconds"]
    assert "`length:nix` names mesh axis `nix`" in rows_of(tmp_path)[-1]["reason"]

    told = swept(capsys, *arguments, "--rounds=3")
    assert "1 of 3 candidates were measured earlier" in told  # that which fails
    more = [json.loads(line) for line in (tmp_path / FILE).read_text().splitlines()[len(lines) :]]
    assert sorted(line["key"] for line in more if "round" in line) == sorted([first, second])


@pytest.mark.long
def test_a_compiler_has_its_own_account_of_memory(own, tmp_path, capsys):
    arguments = (own, "--measure=compile", "--host_devices=2", f"--workdir={tmp_path}")
    meshes = ("--mesh_shape=data:2", "--mesh_shape=data:4", "--memory=1GiB")
    told = swept(capsys, *arguments, *meshes, "--layout=batch:data; vocab:-", "--parallel=1")
    done, lost = rows_of(tmp_path)
    assert done["compile_seconds"] > 0 and done["fits"]
    assert done["seconds"] == done["estimated_seconds"]
    held = 3 * 256 * 8 * 4  # parameters and the optimizer's two moments, whole on each device
    assert held < done["peak_bytes"] < 100 * held
    assert done["peak_bytes"] != done["planned_peak_bytes"] > held
    assert lost["reason"].startswith("mesh data:4 needs 4 devices, but this machine has 2 (cpu)")
    assert "peak: by the compiler's account" in " ".join(told.split())


@pytest.mark.long
def test_topologies_are_swept_with_their_own_chips(tmp_path, capsys):
    machines = ("--topology=v5e:2x4", "--topology=h100:8x{1,2}")
    arguments = (*TINY, "--mesh_shape=data:{4,8},model:2", "--layout=batch:data; heads:{model,-}")
    told = swept(capsys, *arguments, *machines, "--parallel=1", f"--workdir={tmp_path}")
    assert "gpt_mini, v5e:2x4, h100:8x1, h100:8x2; step:" in told
    rows = rows_of(tmp_path)
    places = {
        "v5e:2x4": "data:4 model:2",
        "h100:8x1": "data:4 model:2",
        "h100:8x2": "data:8 model:2",
    }
    assert len(rows) == 6
    assert {(row["topology"], row["mesh"]) for row in rows} == {*places.items()}
    for row in rows[::2]:
        given = [*TINY, f"--mesh_shape={row['mesh']}", f"--layout={row['layout']}"]
        machine = row["topology"].partition(":")[0]
        job = jobs.on_hardware(jobs.build(*flags.read(given)), machine)  # as `compile` does
        report = explain(checked_program(*jitted_step(job)), machine)
        assert row["seconds"] == report.simulated.seconds
        assert row["peak_bytes"] == report.memory.peak_bytes
    with (tmp_path / "sweep.csv").open(newline="") as file:
        assert [line["topology"] for line in csv.DictReader(file)] == [r["topology"] for r in rows]
    facts = json.loads((tmp_path / "sweep.json").read_text())
    gib = 2**30
    assert facts["topologies"] == {"v5e:2x4": 16 * gib, "h100:8x1": 80 * gib, "h100:8x2": 80 * gib}
    page = (tmp_path / "index.html").read_text()
    assert "16.0 GiB on v5e:2x4; 80.0 GiB on h100:8x1, h100:8x2" in page
    assert "16.0 GiB: all on v5e:2x4" in page and "80.0 GiB: all on h100:8x1, h100:8x2" in page
    told = swept(capsys, *arguments, *machines[1:], f"--workdir={tmp_path}")
    assert "4 of 4 candidates were measured earlier" in told


@pytest.mark.long
def test_time_decides_in_a_sweep_where_it_does_in_explain(tmp_path, capsys):
    sizes = "--model_args=layers=2,embed=2048,heads=16,d_ff=8192"
    arguments = (sizes, "--batch_size=64", "--length=512", "--policy=compute=bfloat16")
    layout = "--layout=batch:data; heads:model; d_ff:model"
    arguments = (*arguments, "--mesh_shape=data:4,model:4", layout)
    peaks = []
    for number, given in enumerate([("--hardware=v5p",), ()]):
        folder = tmp_path / str(number)
        swept(capsys, *arguments, *given, f"--workdir={folder}", "--parallel=1")
        (row,) = rows_of(folder)
        assert run(["explain", *arguments, *given]) == 0
        text = capsys.readouterr().out
        assert ("halves: batch" in text) == bool(given)
        assert f"simulated: {show_seconds(row['seconds'])} per step" in text
        (peak,) = re.findall(r"\n  peak +(\S+ \S+)  ", text)
        assert peak == show_bytes(row["peak_bytes"])
        peaks.append(row["peak_bytes"])
    assert peaks[0] != peaks[1]  # the programs differ


@pytest.mark.skipif(find_spec("libtpu") is None, reason="needs libtpu")
def test_the_compiler_of_tpus_has_its_account_of_each_topology(own, tmp_path, capsys):
    arguments = (own, "--batch_size=8", "--layout=batch:data; vocab:-")
    machines = ("--mesh_shape=data:{4,8}", "--topology=v5e:2x{2,4}", "--measure=compile")
    told = swept(capsys, *arguments, *machines, "--parallel=1", f"--workdir={tmp_path}")
    assert "peak: by the compiler's account" in told
    for row in rows_of(tmp_path):
        assert not row["reason"] and row["fits"] and row["compile_seconds"] > 0
        assert row["peak_bytes"] != row["planned_peak_bytes"]
        mesh, topology = f"--mesh_shape={row['mesh']}", f"--topology={row['topology']}"
        assert run(["compile", *arguments, mesh, topology]) == 0
        (line,) = [
            line for line in capsys.readouterr().out.splitlines() if "  by the compiler " in line
        ]
        assert show_bytes(row["peak_bytes"]) in line


@pytest.mark.long
def test_what_does_not_fit_comes_last_of_what_is_measured(own, tmp_path, capsys):
    arguments = (own, "--mesh_shape=data:2", "--layout=batch:data; params/vocab:{data,-}")
    swept(capsys, *arguments, f"--workdir={tmp_path / 'a'}", "--parallel=1")
    less, more = sorted(row["peak_bytes"] for row in rows_of(tmp_path / "a"))
    assert less < more
    told = swept(capsys, *arguments, f"--memory={less}", f"--workdir={tmp_path / 'b'}")
    rows = rows_of(tmp_path / "b")
    assert [row["fits"] for row in rows] == [True, False]
    assert "does not fit" in told


@pytest.mark.long
def test_where_nothing_fits_it_says_what_comes_nearest_and_what_makes_it_fit(own, tmp_path, capsys):
    asked = (own, "--layout=batch:data; params/vocab:{data,-}")
    swept(capsys, *asked, "--mesh_shape=data:2", f"--workdir={tmp_path / 'a'}", "--parallel=1")
    least = min(row["peak_bytes"] for row in rows_of(tmp_path / "a"))
    memory = f"--memory={least - 1}"
    told = swept(
        capsys, *asked, "--mesh_shape=data:2", memory, f"--workdir={tmp_path / 'b'}", "--parallel=1"
    )
    rows = rows_of(tmp_path / "b")
    assert not any(row["fits"] or row["front"] for row in rows)
    (nearest,) = [row["rank"] for row in rows if row["peak_bytes"] == least]
    assert f"none of 2 fits; #{nearest} comes nearest" in told
    assert f"#{nearest} comes nearest" in (tmp_path / "b" / "index.html").read_text()
    # What it advises does make it fit.
    _, advised = told.split("what makes it fit, by the plan:\n")
    mesh = re.search(r"--mesh_shape=(\S+) \(2 times the devices\)", advised).group(1)
    told = swept(capsys, own, asked[1], f"--mesh_shape={mesh}", memory, "--parallel=1")
    assert "comes nearest" not in told


def test_changes_are_judged_by_plans_with_what_the_compiler_needs_beside_them(own):
    asked = (own, "--mesh_shape=data:2", "--layout=batch:data")
    subject = Subject.of(Setup((*asked, "--memory=1GiB"), None))
    program = subject.program(Candidate("data:2", "batch:data"))
    plan = program.peak_bytes
    subject.values.memory = int(1.1 * plan)  # the plan fits, and what the compiler makes does not
    one = Result(
        "data:2",
        "batch:data",
        devices=2,
        seconds=1.0,
        peak_bytes=int(1.3 * plan),
        planned_peak_bytes=plan,
        fits=False,
    )
    told = nearest(subject, ranked([one]))
    assert told.startswith("it does not fit; #1 comes nearest: ") and "1.18 times the" in told
    peaks = re.findall(r": ([\d.]+) (\w+), ", told.partition("what makes it fit")[2])
    units = {"B": 1, "KiB": 2**10, "MiB": 2**20}
    assert peaks and all(float(n) * units[unit] <= 1.01 * plan / 1.18 for n, unit in peaks)
    assert "(1 times" not in told


def test_what_a_compiler_is_warned_of_is_noted_in_its_row(own, monkeypatch):
    subject = Subject.of(Setup((own, "--mesh_shape=data:2", "--layout=batch:data"), None))
    compiles = SpmdProgram.compile

    def compiled(program, *rest):
        warnings.warn("compiled without something", stacklevel=2)
        return compiles(program, *rest)

    monkeypatch.setattr(SpmdProgram, "compile", compiled)
    result = by_compiling(subject, Asked(Candidate("data:2", "batch:data"), "key"))
    assert result.compile_seconds > 0 and result.notes == ("compiled without something",)


@pytest.mark.long
def test_without_a_workdir_nothing_is_written(own, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*.*"))
    told = swept(capsys, own, "--mesh_shape=data:2", "--layout=batch:data")
    assert "batch:data" in told and "index.html" not in told
    assert [f for f in sorted(tmp_path.rglob("*.*")) if "__pycache__" not in str(f)] == before


@pytest.mark.long
def test_if_nothing_can_be_measured_it_is_an_error(own, capsys):
    told = swept(capsys, own, "--mesh_shape=data:2", "--layout=hedas:data", code=2)
    assert "none of 1 candidates could be measured" in told


def test_all_mistakes_are_reported_at_once(capsys, tmp_path):
    told = swept(
        capsys,
        "--mesh_shape=data",
        f"--layout={tmp_path}/none.txt",
        "--model=gpt_minni",
        "--html=x.html",
        "--compare_layout=batch:data",
        "--measure=runs",
        "--rouns=3",
        code=2,
    )
    for part in (
        "7 problems",
        "--mesh_shape: there is no file data; what is no file has a colon",
        f"--layout: there is no file {tmp_path}/none.txt",
        "--model: unknown model 'gpt_minni'",
        "--html: a sweep writes its pages into --workdir",
        "--compare_layout is for `explain`; give `sweep` a second --layout",
        "--measure: unknown choice 'runs'",
        "unknown flag --rouns. Did you mean `--rounds`?",
    ):
        assert part in told


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--mesh_shape=data:2"], "--layout: give what to sweep, as in --layout="),
        (["--layout=batch:data"], "--layout: `batch:data` needs a mesh: give --mesh_shape, or"),
        (
            ["--mesh_shape=data:2", "--layout=batch:data", "--backend=jax_auto"],
            "--backend: what jax_auto sends is XLA's choice",
        ),
        (
            ["--mesh_shape=data:8", "--layout=batch:data", "--topology=v5e:2x4", "--measure=run"],
            "--measure=run: steps run on the devices there are; leave --topology out, or measure",
        ),
        (
            [*ON_GPUS, "--topology=h100:8x1", "--measure=compile"],
            "--measure=compile: h100:8x1 can be planned only; GPU programs are compiled where the",
        ),
        (
            [*ON_GPUS, "--topology=h100:8x1", "--hardware=h100"],
            "--hardware: that of each --topology is known; leave it out",
        ),
        ([*ON_GPUS, "--slices=2"], "--slices: give their --topology, as in --topology=v5e:16x16"),
        (
            [*ON_GPUS, "--topology=v5p:8x8x9"],
            "--topology: no topology v5p:8x8x9; TPU v5p has slices of 3 directions, from 2x2x1 to",
        ),
        (
            [*ON_GPUS, "--topology=h100:8x2"],
            "--mesh_shape: mesh data:8 covers no topology: mesh data:8 has 8 devices, but h100:8x2",
        ),
        (
            ["--mesh_shape=data:2", "--layout=batch:data", "--backend=numpy", "--measure=run"],
            "--measure=run is for --backend=jax",
        ),
    ],
)
def test_a_mistake_is_reported_with_its_flag(capsys, arguments, problem):
    assert swept(capsys, *arguments, code=2).startswith(f"meshdsl sweep: {problem}")


def test_a_workdir_in_use_is_reported(folder, capsys):
    from meshdsl.reports.sweeps.store import Store

    with Store(folder):
        told = swept(capsys, *TINY, *MESHES, *LAYOUTS, f"--workdir={folder}", code=2)
    assert told == f"meshdsl sweep: another sweep is at work in {folder}\n"
    assert os.listdir(folder / "pages")
