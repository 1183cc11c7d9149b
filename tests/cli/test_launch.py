"""`meshdsl launch`: its mistakes are told at once; what it starts goes on after failures."""

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from meshdsl.cli.launch import _keeping_compiled, _without
from meshdsl.cli.main import run
from meshdsl.training.checkpointing.workdir import locked
from meshdsl.training.launching.rehearsing import REHEARSAL
from meshdsl.training.launching.warm import Warm
from meshdsl.training.processes import meeting

SMALL = (
    "--model=gpt_mini",
    "--model_args=layers=2,embed=32,heads=4,kv=8,d_ff=64",
    "--batch_size=8",
    "--length=16",
    "--log_every=1",
    "--eval_every=1000",
    "--eval_batches=1",
    "--layout=batch:data; params/embed:data",
    "--host_devices=1",
)
BEYOND = ("--first_process=2", "--processes=3")
TRAIN = ("train", "--workdir=unused", "--checkpoint_every=10")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ((), "the command to launch is `train`, which is missing: meshdsl launch --processes=2 --"),
        (("--", "explain"), "the command to launch is `train`, not 'explain'"),
        (("--steps=5", "--", *TRAIN), "--steps: flags of `train` come after `-- train`"),
        (("--", "train"), "--workdir is missing: its checkpoints are what a restart goes on from"),
        (("--", *TRAIN[:2]), "--checkpoint_every or --checkpoint_minutes is missing"),
        (("--", *TRAIN, "--sted=3"), "train: unknown flag --sted"),
        (("--", *TRAIN, "--process_id=0"), "--process_id: `launch` numbers the processes"),
        (("--", *TRAIN, "--coordinator=a:1"), "--num_processes is missing, beside --coordinator"),
        (("--processes=2", "--", *TRAIN, "--coordinator=auto"), "the scheduler numbers the proce"),
        (("--first_process=2", "--", *TRAIN), "--first_process is for a job on several hosts"),
        (("--elastic_axis=data", "--", *TRAIN), "--elastic_axis is for a job on several hosts"),
        (("--spare", "--", *TRAIN), "--spare is for a job on several hosts"),
        (
            [*BEYOND, "--", *TRAIN, "--coordinator=a:1", "--num_processes=4"],
            "--first_process=2 and --processes=3 go beyond the 4 of --num_processes",
        ),
        (("--processes=0", "--max_restarts=-1"), "--processes: "),
    ],
)
def test_a_command_that_cannot_be_launched_is_told_at_once(arguments, told, capsys):
    assert run(["launch", *arguments]) == 2
    assert told in capsys.readouterr().err
    assert not Path("unused").exists()


def test_flags_that_fewer_processes_change_are_left_out():
    words = ["train", "--mesh_shape=data:8", "-microbatches", "4", "--steps", "5", "--overlap"]
    assert [*_without(words, ["--mesh_shape", "--microbatches"])] == ["train", *words[4:]]


@pytest.mark.parametrize(
    ("axis", "mesh", "told"),
    [
        ("dat", "--mesh_shape=data:2", "the mesh data:2 has no axis 'dat'. Did you mean `data`?"),
        ("data", "--mesh_shape=data:3", "3 devices of the mesh data:3 do not divide evenly among"),
        ("data", "--mesh_shape=auto", "--elastic_axis needs a mesh that is written"),
        ("data", "--config=run.toml", "--elastic_axis changes --mesh_shape: give them on the comm"),
    ],
)
def test_a_mesh_that_cannot_become_smaller_is_told(axis, mesh, told, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").write_text('mesh_shape = "data:2"\n')
    words = [f"--elastic_axis={axis}", "--", *TRAIN, mesh, "--coordinator=localhost:1"]
    assert run(["launch", *words, "--num_processes=2"]) == 2
    assert told in capsys.readouterr().err


def test_two_supervisors_for_one_job_are_told(tmp_path, capsys):
    with locked(tmp_path, "launch.0.lock"):
        assert run(["launch", "--", "train", f"--workdir={tmp_path}", "--checkpoint_every=1"]) == 2
    told = capsys.readouterr().err
    assert told.startswith(f"meshdsl launch: workdir {tmp_path} is in use by process {os.getpid()}")
    assert told.endswith("or for another host of the job another --first_process\n")


def test_a_second_spare_host_on_one_machine_is_told_where_to_start(tmp_path, capsys):
    words = ["train", f"--workdir={tmp_path}", "--checkpoint_every=1", "--num_processes=2"]
    with locked(tmp_path, f"launch.spare.{socket.gethostname()}.lock"):
        assert run(["launch", "--spare", "--", *words, "--coordinator=localhost:1"]) == 2
    told = capsys.readouterr().err
    assert told.endswith("start the spare host on another machine: one has one for each workdir\n")


def test_a_port_that_others_have_is_told_before_anything_is_started(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(meeting, "_HELD", 0.0)
    monkeypatch.setattr(Warm, "begin", lambda warm: pytest.fail("a template is started"))
    with socket.create_server(("", 0)) as other:
        where = f"--coordinator=localhost:{other.getsockname()[1]}"
        words = ["train", f"--workdir={tmp_path}", "--checkpoint_every=1", "--num_processes=2"]
        assert run(["launch", "--processes=2", "--", *words, where]) == 2
    told = capsys.readouterr().err
    assert f"process 0 cannot listen on port {where.rpartition(':')[2]} of this host: Add" in told
    assert not (tmp_path / "launch.jsonl").exists()


def test_a_cache_of_compiled_programs_that_the_user_has_stays(monkeypatch, tmp_path):
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    assert _keeping_compiled(tmp_path)["JAX_COMPILATION_CACHE_DIR"] == f"{tmp_path}/compiled"
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "mine")
    assert _keeping_compiled(tmp_path)["JAX_COMPILATION_CACHE_DIR"] == "mine"


def started(
    count, text, workdir, *arguments, restarts=50, launch=(), mesh="data:2", streams=None, within=()
):
    """Starts a supervisor that trains in some processes.

    Args:
        streams: where its output goes, by the names of `subprocess.Popen`; None: into pipes.
        within: a command that runs another one.
    """
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    environment.pop("XLA_FLAGS", None)
    line = [*within, sys.executable, "-m", "meshdsl", "launch", f"--processes={count}"]
    small = [flag for flag in SMALL if not any(flag[:9] == other[:9] for other in arguments)]
    line += [f"--max_restarts={restarts}", *launch, "--", "train", *small, f"--data={text}"]
    line += [f"--workdir={workdir}", f"--mesh_shape={mesh}", *arguments]
    streams = streams or {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(line, env=environment, text=True, **streams)


def losses(workdir):
    try:
        lines = (workdir / "metrics.jsonl").read_text().splitlines()
        return {line["step"]: line["loss"] for line in map(json.loads, lines)}
    except (OSError, ValueError):  # none yet, or it is being written
        return {}


def processes_of(supervisor):
    """Returns the processes that a supervisor has started, by their numbers in the job."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            words = (folder / "cmdline").read_bytes().decode().split("\0")
        except (OSError, ValueError):
            continue
        numbers = [w.partition("=")[2] for w in words if w.startswith("--process_id=")]
        if parent == supervisor.pid and numbers:
            found[int(numbers[0])] = int(folder.name)
    return found


def wait_for(condition, process, seconds=300):
    end = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.fixture
def text(tmp_path):
    file, rng = tmp_path / "text.txt", random.Random(0)
    words = ["".join(rng.choices("abcdefgh", k=5)) for _ in range(40)]
    file.write_text(" ".join(rng.choices(words, k=4000)))
    return file


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="finds processes in /proc")
@pytest.mark.parametrize("copies", [False, True])
def test_losses_after_kills_are_those_of_a_run_that_nothing_happened_to(copies, text, tmp_path):
    """To the bit. A kill costs the steps since the last checkpoint, or with copies one at most."""
    when = ("--steps=200", f"--checkpoint_every={100 if copies else 10}")
    alone = started(2, text, tmp_path / "alone", *when)
    _, errors = alone.communicate(timeout=600)
    assert alone.returncode == 0, errors
    rng, work = random.Random(1), tmp_path / "work"
    job = started(2, text, work, *when, *[f"--host_copies={tmp_path}/copies"] * copies)
    reached = [0]
    if not copies:  # a start before the first checkpoint begins anew
        wait_for(lambda: any(one.name.isdigit() for one in (work / "checkpoints").glob("*")), job)
    for kill in range(6):
        wait_for(lambda: max(losses(work), default=0) > reached[-1] + 10, job)
        time.sleep(rng.random() / 10)
        reached.append(max(losses(work)))
        os.kill(processes_of(job)[kill % 2], signal.SIGKILL)
    out, errors = job.communicate(timeout=600)
    assert job.returncode == 0, errors
    # On a busy machine the other process may be seen to end before the one that was killed.
    assert errors.count(": restart ") == 6
    assert any((work / "compiled").iterdir())
    assert losses(work) == losses(tmp_path / "alone") and len(losses(work)) == 200
    begun = [int(line.split()[4].strip(",")) for line in out.splitlines() if "going on" in line]
    costs = [before - step for before, step in zip(reached[1:], begun, strict=True)]
    assert max(costs) <= (1 if copies else 20), costs
    assert not (tmp_path / "copies").exists()
    record = [json.loads(line) for line in (work / "launch.jsonl").read_text().splitlines()]
    again = ["failed", "started", "stepped"]
    assert [one["event"] for one in record] == ["started", "stepped", *again * 6, "ended"]
    stepped = [one for one in record if one["event"] == "stepped"]
    assert all(one["recovery_seconds"] > 0 for one in stepped[1:])


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="finds processes in /proc")
def test_supervisors_of_two_hosts_go_on_together_after_kills(text, tmp_path):
    """To the bit: of processes of either host, and of a host with its supervisor."""
    work = tmp_path / "work"
    when = ("--steps=120", "--checkpoint_every=10")
    alone = started(2, text, tmp_path / "alone", *when)
    with socket.create_server(("localhost", 0)) as listener:
        where = f"--coordinator=localhost:{listener.getsockname()[1]}"

    def host(number):
        own = f"--first_process={number}"
        return started(1, text, work, *when, where, "--num_processes=2", launch=[own])

    _, errors = alone.communicate(timeout=600)
    assert alone.returncode == 0, errors
    first, second = host(0), host(1)
    for kill, after in ((first, 15), (second, 40)):
        wait_for(lambda after=after: max(losses(work), default=0) > after, first)
        (process,) = processes_of(kill).values()
        os.kill(process, signal.SIGKILL)
        began = time.monotonic()
        others = [n for one in (first, second) for n in processes_of(one).values()]
        wait_for(lambda others=others: not any(map(alive, others)), first)
        assert time.monotonic() - began < 5
    wait_for(lambda: max(losses(work)) > 70, first)
    second.kill()
    second.communicate()
    second = host(1)
    for one in (first, second):
        _, errors = one.communicate(timeout=600)
        assert one.returncode == 0, errors
    assert losses(work) == losses(tmp_path / "alone") and len(losses(work)) == 120


def hosts_that_can_be_lost(text, folder, when, shrink_after, copies):
    """Trains in `alone`; returns what starts one of three hosts that train alike in `work`."""
    alone = started(3, text, folder / "alone", *when, mesh="data:3")
    _, errors = alone.communicate(timeout=600)
    assert alone.returncode == 0, errors
    with socket.create_server(("localhost", 0)) as listener:
        where = f"--coordinator=localhost:{listener.getsockname()[1]}"

    def host(number):
        own = [where, "--num_processes=3"]
        own += [f"--host_copies={folder}/copies.{number}"] * copies
        line = [f"--first_process={number}", "--elastic_axis=data"]
        line.append(f"--shrink_after={shrink_after}")
        return started(1, text, folder / "work", *when, *own, launch=line, mesh="data:3")

    return host


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="finds processes in /proc")
@pytest.mark.parametrize("copies", [False, True])
def test_fewer_hosts_go_on_with_the_same_batches_and_grow_again(copies, text, tmp_path):
    """Losses are those of a run that nothing happened to, within rounding."""
    work, steps = tmp_path / "work", 800
    when = (f"--steps={steps}", "--checkpoint_every=10")
    host = hosts_that_can_be_lost(text, tmp_path, when, "10s", copies)
    hosts = [host(number) for number in range(3)]
    wait_for(lambda: max(losses(work), default=0) > 15, hosts[0])
    hosts[2].kill()
    hosts[2].communicate()
    reached = max(losses(work))
    wait_for(lambda: max(losses(work)) > reached + 25, hosts[0])
    hosts[2] = host(2)
    output = [one.communicate(timeout=600) for one in hosts]
    assert [one.returncode for one in hosts] == [0] * 3, output
    assert "going on with 2 of 3 processes, on the mesh data:2" in output[0][1]
    found, expected = losses(work), losses(tmp_path / "alone")
    assert [*found] == [*range(1, steps + 1)]
    np.testing.assert_allclose([*found.values()], [*expected.values()], rtol=2e-5)
    record = [json.loads(line) for line in (work / "launch.jsonl").read_text().splitlines()]
    kinds = [e for e in (one["event"] for one in record) if e not in ("stepped", "compiled_ahead")]
    assert kinds == ["started", "failed", "started", "renewed", "started", "ended"]


@pytest.mark.slow
def test_a_start_finds_the_programs_that_were_compiled_ahead(text, tmp_path):
    """For two processes, which nothing but the rehearsal has compiled."""
    with socket.create_server(("localhost", 0)) as listener:
        where = f"--coordinator=localhost:{listener.getsockname()[1]}"
    work = tmp_path / "work"
    words = [*SMALL, f"--data={text}", f"--workdir={work}", "--mesh_shape=data:2", "--steps=1000"]
    words += ["--checkpoint_every=1000", where, "--num_processes=2"]
    # Its low priority would have this test wait for all others.
    start = "import meshdsl.cli.train as t; t.give_way = lambda: None; "
    start += "from meshdsl.cli.main import console; raise SystemExit(console())"
    variables = {**_keeping_compiled(work), "JAX_PLATFORMS": "cpu", REHEARSAL: "1"}
    variables.pop("XLA_FLAGS", None)
    lines = [[sys.executable, "-c", start, "train", *words, f"--process_id={n}"] for n in (0, 1)]
    both = [subprocess.Popen(line, env=variables, stdout=subprocess.DEVNULL) for line in lines]
    assert [one.wait(300) for one in both] == [75, 75]
    assert {file.name for file in work.iterdir()} == {"compiled"}

    def programs():
        files = [file for file in work.glob("compiled/process.*/*") if not file.suffix]
        return {file: file.stat().st_mtime_ns for file in files}

    ahead = programs()
    assert {file.parent.name for file in ahead} == {"process.0", "process.1"}
    one = started(2, text, work, "--checkpoint_every=1000", "--steps=1000")
    wait_for(lambda: len(losses(work)) > 2, one)
    one.send_signal(signal.SIGTERM)
    one.communicate(timeout=300)
    used = {file: used for file, used in programs().items() if used > ahead.get(file, 0)}
    assert {*ahead} <= {*used}
    assert len(used) - len(ahead) <= 2  # that of the first state, in each process


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="finds processes in /proc")
def test_the_first_host_is_lost_and_the_others_go_on_from_their_memory(text, tmp_path):
    """One step at most is lost; when the host is back, the job has all of them again."""
    work, steps = tmp_path / "work", 600
    when = (f"--steps={steps}", "--checkpoint_every=1000", "--layout=batch:data")
    host = hosts_that_can_be_lost(text, tmp_path, when, "2s", copies=True)
    hosts = [host(number) for number in range(3)]
    wait_for(lambda: max(losses(work), default=0) > 15, hosts[1])
    (process,) = processes_of(hosts[0]).values()
    hosts[0].kill()
    os.kill(process, signal.SIGKILL)
    hosts[0].communicate()
    reached = max(losses(work))
    wait_for(lambda: max(losses(work)) > reached + 25, hosts[1])
    hosts[0] = host(0)
    output = [one.communicate(timeout=600) for one in hosts]
    assert [one.returncode for one in hosts] == [0] * 3, output
    said = [line for out, _ in output for line in out.splitlines() if "going on from" in line]
    assert "copies in the memory of 2 hosts" in said[0] and len(said) == 2, said
    went_on = int(said[0].split()[4].strip(","))
    assert reached - 1 <= went_on <= reached + 2
    assert "leads the job from now on" in output[1][1]
    found, expected = losses(work), losses(tmp_path / "alone")
    # The host that writes them may be lost between a step's copies, on other hosts, and its line.
    assert [*found] == [n for n in range(1, steps + 1) if not reached < n <= went_on]
    np.testing.assert_allclose([*found.values()], [expected[n] for n in found], rtol=2e-5)
    assert not [*tmp_path.glob("copies.*")]


def alive(process):
    try:
        return "Z" not in Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="finds processes in /proc")
def test_two_kills_at_once_and_one_as_they_start_again_are_survived(text, tmp_path):
    work = tmp_path / "work"
    copies = f"--host_copies={tmp_path}/copies"
    job = started(2, text, work, "--steps=40", "--checkpoint_every=100", copies)
    wait_for(lambda: len(losses(work)) > 3, job)
    first = processes_of(job)
    for process in first.values():
        os.kill(process, signal.SIGKILL)
    wait_for(lambda: len(processes_of(job)) == 2 and processes_of(job) != first, job)
    time.sleep(1.0)
    os.kill(processes_of(job)[0], signal.SIGKILL)
    out, errors = job.communicate(timeout=600)
    assert job.returncode == 0, errors
    assert errors.count("was killed by signal 9 (SIGKILL)") == 2
    assert "going on from step" in out and [*losses(work)] == [*range(1, 41)]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="finds processes in /proc")
def test_a_signal_to_the_supervisor_ends_the_job_with_a_checkpoint(text, tmp_path):
    work = tmp_path / "work"
    job = started(2, text, work, "--steps=100000", "--checkpoint_every=50000")
    wait_for(lambda: len(losses(work)) > 3, job)
    job.send_signal(signal.SIGTERM)
    _, errors = job.communicate(timeout=300)
    assert job.returncode == 143, errors
    assert [path.name.isdigit() for path in (work / "checkpoints").iterdir()] == [True]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="finds processes in /proc")
def test_a_process_that_stands_still_has_all_of_them_start_again(text, tmp_path):
    work = tmp_path / "work"
    copies = f"--host_copies={tmp_path}/copies"
    job = started(2, text, work, "--steps=60", "--checkpoint_every=60", copies, "--step_timeout=20")
    wait_for(lambda: len(losses(work)) > 3, job)
    os.kill(processes_of(job)[1], signal.SIGSTOP)
    _, errors = job.communicate(timeout=600)
    assert job.returncode == 0, errors
    assert "process 0, " in errors and "has got nowhere for 20 s" in errors
    assert "process 0 ended with exit code 1" in errors and len(losses(work)) == 60


@pytest.mark.slow
def test_a_mistake_in_what_is_launched_is_told_once(text, tmp_path):
    job = started(
        2, text, tmp_path / "work", "--steps=5", "--checkpoint_every=5", "--packing=maybe"
    )
    assert job.communicate(timeout=300)[1].count("--packing") == 1 and job.returncode == 2
    job = started(2, tmp_path / "no.txt", tmp_path / "work", "--checkpoint_every=5")
    _, errors = job.communicate(timeout=300)
    assert job.returncode == 2 and errors.count("matches no file") == 1, errors
