"""What `meshdsl launch` does when a machine stands still, its disk refuses, or its network is lost.

The disks and networks are of the tests' own: a file system in memory, and a namespace.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress

import pytest

from tests.cli.test_launch import losses, processes_of, started, wait_for

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="makes disks and networks of Linux"),
]


@pytest.fixture
def text(tmp_path):
    file, rng = tmp_path / "text.txt", random.Random(0)
    file.write_text(" ".join("".join(rng.choices("abcdefgh", k=5)) for _ in range(4000)))
    return file


@pytest.fixture
def disk(tmp_path):
    """Returns a file system of 64 MB, in memory."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", folder]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("this user cannot mount file systems")
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


@pytest.fixture
def job():
    """Returns what starts a job of two processes, which does not outlive the test."""
    jobs = []

    def start(*arguments, **others):
        jobs.append(started(2, *arguments, "--steps=100000", **others))
        return jobs[-1]

    yield start
    for one in jobs:
        one.kill()
        one.communicate()


def record(work):
    return [json.loads(line) for line in (work / "launch.jsonl").read_text().splitlines()]


def goes_on(one, work):
    """Waits until a job has taken some steps more; ends it, and returns its losses."""
    before = max(losses(work))
    wait_for(lambda: max(losses(work), default=0) > before + 5, one)
    one.send_signal(signal.SIGTERM)
    _, errors = one.communicate(timeout=300)
    assert one.returncode == 143, errors
    return losses(work)


def check_losses(found, job, text, folder, *flags):
    """Compares losses with those of a job that nothing happened to, to the bit."""
    alone = job(text, folder / "alone", *flags, f"--exit_at_step={len(found)}")
    _, errors = alone.communicate(timeout=600)
    assert losses(folder / "alone") == found, errors


def check_costs(work, reached):
    """Checks that no start went on from more than one step before the one that was reached."""
    begun = [one["step"] for one in record(work) if one["event"] == "started"]
    assert all(step is not None and step >= reached - 1 for step in begun[1:]), begun


@pytest.mark.parametrize("which", [0, 1])
def test_a_process_that_stands_still_for_half_a_minute_costs_one_step_at_most(
    which, job, text, tmp_path
):
    """JAX's collectives on CPUs give up after just that time: then all start again."""
    work = tmp_path / "work"
    flags = ("--checkpoint_every=1000", f"--host_copies={tmp_path}/copies")
    one = job(text, work, *flags)
    wait_for(lambda: len(losses(work)) > 3, one)
    still = processes_of(one)[which]
    os.kill(still, signal.SIGSTOP)
    time.sleep(30)
    reached = max(losses(work))
    with suppress(ProcessLookupError):  # the others have ended, and it with them
        os.kill(still, signal.SIGCONT)
    found = goes_on(one, work)
    check_costs(work, reached)
    check_losses(found, job, text, tmp_path, *flags)


def test_a_full_disk_ends_the_job_with_the_cause(disk, job, text, tmp_path):
    """The same command goes on when there is room again, with the same losses."""
    work, flags = disk / "work", ("--checkpoint_every=20",)
    one = job(text, work, *flags)
    wait_for(lambda: max(losses(work), default=0) > 25, one)
    filler = disk / "filler"
    with pytest.raises(OSError, match="No space left"), filler.open("wb", 0) as file:
        while True:
            file.write(bytes(2**12))
    _, errors = one.communicate(timeout=300)
    assert one.returncode == 2 and "No space left on device" in errors, errors
    assert "Traceback" not in errors
    filler.unlink()
    before = len(record(work))
    again = job(text, work, *flags)
    wait_for(lambda: "stepped" in [each["event"] for each in record(work)[before:]], again)
    check_losses(goes_on(again, work), job, text, tmp_path, *flags)


def test_a_disk_that_is_read_only_is_told_at_once(disk, job, text):
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
    one = job(text, disk / "work", "--checkpoint_every=20")
    _, errors = one.communicate(timeout=60)
    assert one.returncode == 2 and "Read-only file system" in errors, errors
    assert "Traceback" not in errors


def test_a_network_that_is_lost_for_a_while_costs_one_step_at_most(job, text, tmp_path):
    work = tmp_path / "work"
    flags = ("--checkpoint_every=1000", f"--host_copies={tmp_path}/copies")
    within = ("unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh")
    if subprocess.run([*within, "true"], capture_output=True).returncode:
        pytest.skip("this user cannot make networks")
    one = job(text, work, *flags, within=within)
    wait_for(lambda: len(losses(work)) > 3, one)

    def set_network(state):
        enter = ["nsenter", "--target", str(one.pid), "--net"]
        subprocess.run([*enter, "ip", "link", "set", "lo", state], check=True)

    set_network("down")
    time.sleep(15)
    reached = max(losses(work))
    set_network("up")
    found = goes_on(one, work)
    check_costs(work, reached)
    check_losses(found, job, text, tmp_path, *flags)
