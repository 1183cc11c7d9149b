"""What one process has saved two take up, and the other way; local disks need not be shared."""

import json
import os
import random
import shutil
import subprocess
import sys
import time

import numpy as np
import pytest

from meshdsl.training.checkpointing.checkpoints import CheckpointWarning
from meshdsl.training.checkpointing.saving import Saving
from tests.lowering.backends.tf.hosts.test_cluster import free_ports
from tests.training import classifier
from tests.training.checkpointing.test_checkpoints import steps_in
from tests.training.processes.test_joining import wait_for
from tests.training.saving_job import checksums
from tests.training.test_resume import run

FSDP = {"mesh": "data:8", "layout": "batch:data; params/pixel:data; optimizer/pixel:data"}
TENSOR = {"mesh": "data:2,model:4", "layout": classifier.LAYOUT}
SMALL = {"mesh": "data:2", "layout": "batch:data; params/hidden:data"}


@pytest.fixture
def start():
    """Returns what starts a job in several processes, none of which outlive the test."""
    started = []

    def job(count, *runs, devices=1, own=None):
        (port,) = free_ports(1)
        here = []
        for index in range(count):
            mine = [{**options, **(own or {}).get(index, {})} for options in runs]
            told = {"coordinator": f"localhost:{port}", "count": count, "index": index}
            text = json.dumps({**told, "devices": devices, "runs": mine})
            here.append(
                subprocess.Popen(
                    [sys.executable, "-m", "tests.training.saving_job", text],
                    env={**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""},
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
        started.extend(here)
        return here

    yield job
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture
def together(start):
    """Returns what runs a job in several processes: what each told, and its errors."""

    def job(count, *runs, **how):
        found = []
        for process in start(count, *runs, **how):
            out, errors = process.communicate(timeout=300)
            told = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
            found.append((told, errors))
        return found

    return job


@pytest.mark.long
def test_two_processes_go_on_from_one_and_one_from_two(together, tmp_path):
    """Parameters and optimizer state are the same to the bit, and the losses those of no stop."""
    whole = run(steps=9).losses
    alone = run(tmp_path / "a", backend="jax", steps=3, saving=Saving(), **FSDP)
    work = {"workdir": str(tmp_path / "a")}
    runs = [{**work, **FSDP, "steps": 3}, {**work, **FSDP, "steps": 6}]
    weights = str(tmp_path / "weights")
    runs.append({**work, **TENSOR, "steps": 6, "save_weights": weights})
    runs.append({"workdir": None, **FSDP, "steps": 1, "init_from": weights})
    (first, errors), (second, _) = together(2, *runs, devices=4)
    assert len(first) == 4, errors
    assert first == second
    there, on, other, new = first
    assert (there["step"], there["losses"]) == (3, [])
    assert there["state"] == checksums(alone.state)
    np.testing.assert_allclose(on["losses"], whole[3:6], atol=2e-5)
    assert (other["losses"], other["state"]) == ([], on["state"])
    again = run(tmp_path / "a", backend="jax", steps=6, saving=Saving(), **TENSOR)
    assert checksums(again.state) == on["state"]
    last = run(tmp_path / "a", backend="jax", steps=9, saving=Saving(), **FSDP)
    np.testing.assert_allclose(last.losses, whole[6:], atol=2e-5)
    np.testing.assert_allclose(new["losses"], run(init_from=weights, steps=1).losses, atol=2e-5)


@pytest.mark.long
def test_all_save_when_the_clock_of_one_says_so(together, tmp_path):
    own = {1: {"saving": {"minutes": 1e-9, "keep": 12}}}
    job = {"workdir": str(tmp_path), "steps": 12, "saving": {"keep": 12}, **SMALL}
    (first, errors), (second, _) = together(2, job, own=own)
    assert first == second and first[0]["step"] == 12, errors
    saved = steps_in(tmp_path / "checkpoints")  # at 1, and less often as they agree less often
    assert saved[0] == 1 and saved[-1] == 12 and len(saved) > 2


@pytest.mark.long
def test_each_process_saves_on_a_disk_of_its_own(together, tmp_path):
    """Killed, they go on from the last that both have; with a disk lost, from the shared one."""
    whole = run(steps=12).losses
    disks, own = disks_of_their_own(tmp_path, 4)
    work = tmp_path / "work"
    job = {"workdir": str(work), "steps": 12, **SMALL}
    assert [out for out, _ in together(2, {**job, **killed(work, 7, 4)}, own=own)] == [[], []]
    common = both_have(disks)
    assert common in (6, 7) and steps_in(work / "checkpoints") == [4]
    copy = shutil.copytree(tmp_path, tmp_path / "copy")
    with pytest.warns(
        CheckpointWarning, match=r"process.0/. is not used: it was saved with anothe"
    ):
        saving = Saving(every=4, local=copy / "disk0", local_every=1)
        assert run(copy / "work", steps=8, saving=saving).losses == pytest.approx(whole[4:8], 2e-5)

    assert [out for out, _ in together(2, {**job, **killed(work, 11, 8)}, own=own)] == [[], []]
    assert begun(work) == [0, common] and both_have(disks) in (10, 11)
    assert steps_in(work / "checkpoints") == [4, 8]

    shutil.rmtree(disks[1])
    (first, errors), (second, _) = together(2, job, own=own)
    assert first == second and first[0]["step"] == 12
    lost = "is not used: process 1 in {}/process.1 has none"
    assert lost.format(disks[1]) in errors
    assert begun(work) == [0, common, 8]
    np.testing.assert_allclose(first[0]["losses"], whole[8:], atol=2e-5)
    found = losses(work)
    assert list(found) == list(range(1, 13))
    np.testing.assert_allclose([*found.values()], whole, atol=2e-5)


@pytest.mark.long
@pytest.mark.parametrize("full", [0, 1])
def test_the_full_disk_of_one_process_is_the_message_of_both(full, start, tmp_path):
    """Orbax would have the other wait for 20 minutes."""
    job = {"workdir": str(tmp_path), "steps": 40, "saving": {"every": 10}, **SMALL}
    for process in start(2, job, own={full: {"full_at": 25}}):
        out, errors = process.communicate(timeout=300)
        assert process.returncode == 1, (out, errors)
        reason = "cannot save a checkpoint in {}/checkpoints: File too large"
        assert reason.format(tmp_path) in errors and "ERROR:" not in errors, errors
    assert 10 in steps_in(tmp_path / "checkpoints")


@pytest.mark.slow
def test_killed_at_any_moment_both_have_a_checkpoint_of_the_last_steps(start, tmp_path):
    """10 times; without local ones they would begin again each time, for none is persistent."""
    disks, own = disks_of_their_own(tmp_path, 100_000)
    work, rng, reached = tmp_path / "work", random.Random(0), 0
    for _ in range(10):
        processes = start(2, {"workdir": str(work), "steps": 100_000, **SMALL}, own=own)
        wait_for(lambda reached=reached: max(losses(work), default=0) > reached + 5, 300)
        time.sleep(rng.random())
        for process in rng.sample(processes, 2):
            process.kill()
            time.sleep(0.05 * rng.random())
        for process in processes:
            process.wait()
        reached = max(losses(work))
        assert both_have(disks) >= reached - 2
    found = losses(work)
    assert list(found) == list(range(1, reached + 1))
    assert len(set(begun(work))) == 10
    np.testing.assert_allclose([*found.values()], run(steps=reached).losses, atol=2e-5)


def disks_of_their_own(folder, every):
    """Returns the disks of two processes, and the options with which each saves on its own."""
    disks = [folder / f"disk{index}" for index in range(2)]
    return disks, {
        index: {"saving": {"every": every, "local": str(disk), "local_every": 1}}
        for index, disk in enumerate(disks)
    }


def losses(workdir):
    """Returns the losses that a run has told so far, by step."""
    file = workdir / "metrics.jsonl"
    lines = file.read_bytes().split(b"\n")[:-1] if file.exists() else []
    return {line["step"]: line["loss"] for line in map(json.loads, lines)}


def killed(workdir, after, saved):
    """Returns the options of a run that is killed after a step, once a checkpoint is there."""
    return {"killed_at": after, "once": str(workdir / "checkpoints" / str(saved))}


def both_have(disks):
    """Returns the last step that both processes have saved."""
    parts = [steps_in(disk / f"process.{index}") for index, disk in enumerate(disks)]
    return max(set(parts[0]) & set(parts[1]))


def begun(workdir):
    """Returns the steps from which a run has gone on."""
    return sorted(int(file.name.split(".")[1]) for file in (workdir / "tensorboard").iterdir())
