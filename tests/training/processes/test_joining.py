"""Many processes train as one; one that differs, or dies, is named."""

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax.experimental import multihost_utils

from meshdsl.training.processes import code_version as versions
from meshdsl.training.processes import joining, watching
from meshdsl.training.processes.code_version import code_version
from meshdsl.training.processes.joining import check_devices, gathered
from tests.lowering.backends.tf.hosts.test_cluster import free_ports
from tests.training import classifier, own_script

SMALL = (
    "--model=gpt_mini",
    "--model_args=layers=2,embed=32,heads=4,kv=8,d_ff=64",
    "--batch_size=8",
    "--length=16",
    "--log_every=2",
    "--eval_every=100",
    "--eval_batches=1",
)
TWO = ("--mesh_shape=data:2", "--layout=batch:data", "--host_devices=1")  # processes
LAYOUTS = {
    "data:4": "batch:data; params/embed:data",
    "data:2,model:2": "batch:data; heads:model; d_ff:model",
    "model:4": "heads:model; d_ff:model; vocab:model",
}


@pytest.fixture
def text(tmp_path):
    file = tmp_path / "text.txt"
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefgh", k=5)) for _ in range(40)]
    file.write_text(" ".join(rng.choices(words, k=4000)))
    return file


@pytest.fixture
def start():
    """Returns what starts the processes of a job, none of which outlive the test."""
    started = []

    def job(count, *arguments, own=None):
        (port,) = free_ports(1)
        found = []
        for number in range(count):
            given = [
                *SMALL,
                *arguments,
                f"--coordinator=localhost:{port}",
                f"--num_processes={count}",
                f"--process_id={number}",
                *(own or {}).get(number, ()),
            ]
            found.append(command(*given))
        started.extend(found)
        return found

    yield job
    for process in started:
        process.kill()
        process.communicate()


def command(*arguments):
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    environment.pop("XLA_FLAGS", None)
    pipe = subprocess.PIPE
    line = [
        sys.executable,
        "-c",
        "from meshdsl.cli.main import console; raise SystemExit(console())",
    ]
    return subprocess.Popen(
        [*line, "train", *arguments], env=environment, stdout=pipe, stderr=pipe, text=True
    )


def ended(process, seconds=300):
    out, errors = process.communicate(timeout=seconds)
    return process.returncode, out, errors


def of_own_script(count, mesh, layout):
    """Runs `own_script` in some processes; returns what each tells."""
    (port,) = free_ports(1)
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    environment.pop("XLA_FLAGS", None)
    pipe = subprocess.PIPE
    line = [sys.executable, "-m", "tests.training.own_script", f"localhost:{port}", str(count)]
    processes = [
        subprocess.Popen(
            [*line, str(number), mesh, layout],
            env=environment,
            stdout=pipe,
            stderr=pipe,
            text=True,
        )
        for number in range(count)
    ]
    told = [ended(process) for process in processes]
    assert [code for code, _, _ in told] == [0] * count, told
    return [json.loads(out.splitlines()[-1]) for _, out, _ in told]


def losses(workdir):
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines}


def alone(text, workdir, steps, *arguments):
    process = command(
        *SMALL, f"--data={text}", f"--workdir={workdir}", f"--steps={steps}", *arguments
    )
    code, _, errors = ended(process)
    assert code == 0, errors
    return losses(workdir)


@pytest.mark.long
@pytest.mark.parametrize(
    ("count", "mesh"),
    [
        (2, "data:2,model:2"),
        pytest.param(2, "data:4", marks=pytest.mark.slow),
        pytest.param(4, "model:4", marks=pytest.mark.slow),
    ],
)
def test_losses_are_those_of_one_process(count, mesh, start, text, tmp_path):
    work = tmp_path / "work"
    processes = start(
        count,
        f"--data={text}",
        f"--workdir={work}",
        f"--mesh_shape={mesh}",
        f"--layout={LAYOUTS[mesh]}",
        f"--host_devices={4 // count}",
        "--steps=6",
        "--checkpoint_every=4",
        "--local_every=2",
        own={n: [f"--local_checkpoints={tmp_path}/disk{n}"] for n in range(count)},
    )
    told = [ended(process) for process in processes]
    assert [code for code, _, _ in told] == [0] * count, told
    assert "step 6/6" in told[0][1]
    assert not any("loss" in out or "step" in out for _, out, _ in told[1:])
    expected = alone(text, tmp_path / "alone", 6)
    found = losses(work)
    assert list(found) == list(expected)
    for n in range(count):
        assert (tmp_path / f"disk{n}" / f"process.{n}" / "2" / f"seal.{n}.json").exists()
    np.testing.assert_allclose([*found.values()], [*expected.values()], atol=2e-5)


@pytest.mark.long
def test_a_script_of_ones_own_reads_in_each_process_what_its_devices_hold():
    expected, all_picked, all_held_out = own_script.run(backend="numpy")
    told = of_own_script(2, "data:2,model:2", classifier.LAYOUT)
    for each in told:
        np.testing.assert_allclose(each["losses"], expected.losses, atol=2e-6)
        assert each["eval"] == pytest.approx(expected.history[-1]["eval_loss"], abs=2e-6)
    seen, held_out = all_picked[-own_script.STEPS :], all_held_out[-2:]
    assert [len(rows) for rows in seen] == own_script.SIZES
    for name, whole in (("picked", seen), ("held_out", held_out)):
        one, other = ([set(rows) for rows in each[name][-len(whole) :]] for each in told)
        assert [len(rows) * 2 for rows in one] == [len(rows) for rows in whole]
        assert [a | b for a, b in zip(one, other, strict=True)] == [set(rows) for rows in whole]


@pytest.mark.long
def test_processes_whose_devices_hold_all_rows_read_all():
    expected, all_picked, _ = own_script.run(backend="numpy")
    for each in of_own_script(2, "model:4", "hidden:model"):
        np.testing.assert_allclose(each["losses"], expected.losses, atol=2e-6)
        assert each["picked"][-own_script.STEPS :] == all_picked[-own_script.STEPS :]


@pytest.mark.slow
def test_a_process_with_another_number_of_devices_is_named(start, text):
    """Such as one on a spare host; JAX itself reports shapes."""
    own = {0: ["--host_devices=2"], 1: ["--host_devices=1"]}
    for process in start(2, f"--data={text}", "--mesh_shape=data:3", own=own):
        code, _, errors = ended(process)
        assert code == 2 and "the processes of the job have different numbers of devices" in errors


def test_the_process_that_has_other_devices_than_most_is_named():
    def devices(*counts):
        return [SimpleNamespace(process_index=n) for n, c in enumerate(counts) for _ in range(c)]

    check_devices(devices(4, 4, 4))
    with pytest.raises(ValueError, match=r"of devices: process 1 has 3, others 4\. All need"):
        check_devices(devices(4, 3, 4, 4))


@pytest.mark.slow
@pytest.mark.parametrize("which", [0, 1])
def test_a_signal_to_one_process_ends_all_alike(which, start, text, tmp_path):
    processes = start(
        2,
        f"--data={text}",
        f"--workdir={tmp_path / 'work'}",
        *TWO,
        "--steps=100000",
    )
    wait_for(lambda: reported(tmp_path / "work") > 2, 300)
    processes[which].send_signal(signal.SIGTERM)
    told = [ended(process, 120) for process in processes]
    assert [code for code, _, _ in told] == [143, 143], told
    assert all("interrupted after step" in errors for _, _, errors in told)
    assert (tmp_path / "work" / "checkpoints").is_dir()


@pytest.mark.slow
def test_processes_end_at_the_step_that_was_set(start, text, tmp_path):
    processes = start(
        2,
        f"--data={text}",
        f"--workdir={tmp_path / 'work'}",
        *TWO,
        "--steps=40",
        "--log_every=10",
        "--exit_at_step=12",
    )
    told = [ended(process) for process in processes]
    assert [code for code, _, _ in told] == [75, 75], told
    assert "ended after step 12 of 40" in told[0][1]


@pytest.mark.long
def test_processes_that_differ_are_named(start, text, tmp_path):
    other = tmp_path / "other.txt"
    other.write_text(text.read_text()[::-1])
    processes = start(
        2,
        "--host_devices=1",
        "--mesh_shape=data:2",
        "--layout=batch:data",
        own={
            0: [f"--data={text}"],
            1: [f"--data={other}", "--learning_rate=3e-3"],
        },
    )
    for process in processes:
        code, _, errors = ended(process)
        assert code == 2
        assert "the processes of the job do not run the same" in errors
        assert "process 1: --learning_rate is 0.003, in process 0 0.001" in errors
        assert "process 1: the data is " in errors


@pytest.mark.long
def test_what_is_wrong_in_one_process_ends_all(start, text):
    processes = start(
        2, "--host_devices=1", own={0: [f"--data={text}"], 1: ["--data=/nowhere/*.txt"]}
    )
    for process in processes:
        code, _, errors = ended(process)
        assert code == 2
        assert "`/nowhere/*.txt` matches no file" in errors
    assert "process 1: " in errors or "--data" in errors


@pytest.mark.slow
def test_a_process_that_is_killed_is_named_and_a_restart_goes_on(start, text, tmp_path):
    """20 times, at random moments; the losses are those of a run that nothing happened to."""
    steps, every, rng = 400, 4, random.Random(0)
    job = (
        f"--data={text}",
        f"--workdir={tmp_path / 'work'}",
        "--mesh_shape=data:2",
        "--layout=batch:data; params/embed:data",
        "--host_devices=1",
        f"--steps={steps}",
        f"--checkpoint_every={every}",
    )
    reached = 0
    for _ in range(20):
        processes = start(2, *job)
        wait_for(lambda reached=reached: reported(tmp_path / "work") > reached, 300)
        time.sleep(rng.random())
        victim = rng.randrange(2)
        before = reported(tmp_path / "work")
        processes[victim].send_signal(signal.SIGKILL)
        began = time.monotonic()
        code, _, errors = ended(processes[1 - victim], 60)
        assert time.monotonic() - began < 60 and code == 1, errors
        assert f"process {victim} on " in errors and "stack trace" not in errors, errors
        reached = before
    expected = alone(text, tmp_path / "alone", steps)
    found = losses(tmp_path / "work")
    shared = [step for step in expected if step in found]
    assert shared
    np.testing.assert_allclose([found[s] for s in shared], [expected[s] for s in shared], atol=2e-5)


def reported(workdir):
    try:
        return max(losses(workdir), default=0)
    except (OSError, ValueError):
        return 0


def wait_for(condition, seconds):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.1)


@pytest.mark.parametrize("changed", ["package/step.py", "lowering/cut.py", "layouts/tables/a.json"])
def test_a_change_in_a_linked_folder_is_another_version(changed, tmp_path):
    for name in ("package/step.py", "lowering/cut.py", "layouts/tables/a.json"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("0")
    package = tmp_path / "package"
    for name in ("lowering", "layouts"):
        (package / name).symlink_to(f"../{name}")
    before = code_version(package)
    assert code_version(package) == before
    (tmp_path / changed).write_text("1")
    assert code_version(package) != before


def test_the_version_of_the_loaded_code_is_known_while_no_file_is_written_to(tmp_path, monkeypatch):
    """Not even with the old content: a process may have imported what was there in between."""
    monkeypatch.setattr(versions, "_REMEMBERED", [])
    file, other = tmp_path / "a.py", tmp_path / "b.json"
    file.write_text("1")
    assert versions.loaded(tmp_path) is None  # nobody has remembered it
    changes = [
        *(lambda: file.write_text("2"), lambda: file.write_text("2"), lambda: other.write_text("")),
        *(lambda: os.utime(file, (0, 0)), other.unlink, lambda: file.rename(tmp_path / "c.py")),
    ]
    for change in changes:
        versions.remember(tmp_path)
        noted = code_version(tmp_path)
        assert versions.loaded(tmp_path) == versions.loaded(tmp_path) == noted
        (tmp_path / "a.txt").write_text("no code")
        assert versions.loaded(tmp_path) is not None
        time.sleep(0.01)  # clocks of file systems are coarse
        change()
        assert versions.loaded(tmp_path) is None
        assert versions.told(tmp_path) == noted  # this process runs it still


def test_texts_of_any_length_are_gathered_by_few_programs(monkeypatch):
    """JAX compiles one for each length of what it gathers, in every process, at every start."""
    rows, sizes, barrier = {}, set(), threading.Barrier(3)

    def process_allgather(row):
        assert row.dtype == np.uint8
        rows[threading.get_ident()] = row
        barrier.wait()
        sizes.update(one.shape for one in rows.values())
        all_rows = np.stack([rows[thread] for thread in sorted(rows)])
        barrier.wait()
        return all_rows

    monkeypatch.setattr(jax, "process_count", lambda: 3)
    monkeypatch.setattr(multihost_utils, "process_allgather", process_allgather)
    lengths = [*range(3), *range(1014, 1019), 2040, 2041, 5000]
    sent = [["ü" * (n // 2) + "." * (n % 2), "", "x"] for n in lengths]
    with ThreadPoolExecutor(3) as pool:
        numbers = {}

        def process(number):
            numbers[threading.get_ident()] = number
            barrier.wait()
            return [gathered(texts[number]) for texts in sent]

        found = [*pool.map(process, range(3))]
    order = [numbers[thread] for thread in sorted(numbers)]
    assert found == [[[texts[n] for n in order] for texts in sent]] * 3
    assert sizes == {(1024,), (2048,), (4096,)}


def test_one_that_compiles_ahead_may_leave_the_others_before_they_have_all(monkeypatch):
    """Its watch would take those that are gone for lost."""
    ended, none = [], free_ports(2)

    def join(*_):
        job = watching.JobProcesses(0, (("localhost",),) * 2, (*none,), SimpleNamespace(), (1,))
        watch = watching.Watch(job, 60.0, threading.Event(), ended.append)
        watch.start()
        joining._JOINED[:] = [(job, watch)]

    monkeypatch.setattr(watching, "_EVERY", 0.01)
    monkeypatch.setattr(watching, "_GRACE", 0.01)
    monkeypatch.setattr(watching.JobProcesses, "close", lambda job: None)
    monkeypatch.setattr(joining, "join", join)
    monkeypatch.setattr(joining, "_APART", [])
    monkeypatch.setattr(jax, "devices", lambda: time.sleep(0.3))
    with joining.apart("localhost:1", 2, 0, 60.0):
        assert not ended
