"""Real processes that end before all have joined, or stand still: tolerated, or named."""

import os
import signal
import subprocess
import sys
import time

import pytest

from tests.lowering.backends.tf.hosts.test_cluster import free_ports

TRACES = ("Check failure stack trace", "Traceback", "*** ")


@pytest.fixture
def start():
    """Returns what starts some of the processes of a job, none of which outlive the test."""
    started = []
    (port,) = free_ports(1)

    def job(
        count, *numbers, seconds=0, join_timeout=300, pause_timeout=300, ends="never", margin=60
    ):
        for number in numbers:
            own = number, seconds, join_timeout, pause_timeout, ends, margin
            given = (f"localhost:{port}", count, *own)
            started.append(
                subprocess.Popen(
                    [sys.executable, "-m", "tests.training.pausing_job", *map(str, given)],
                    env={**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""},
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
        return started[-len(numbers) :]

    yield job
    for process in started:
        process.kill()
        process.communicate()


def last_words(process, seconds=400):
    out, errors = process.communicate(timeout=seconds)
    assert not any(trace in errors for trace in TRACES), errors
    return process.returncode, out + errors


def joined(process):
    while line := process.stdout.readline():
        if line == "joined\n":
            return
    raise AssertionError(process.communicate())


def waits_for(missing, process):
    """Waits until a process says that others are missing."""
    for line in process.stderr:
        if line == f"meshdsl train: waiting for {missing} to join\n":
            return
    raise AssertionError(process.communicate())


@pytest.mark.long
def test_one_that_ends_before_all_have_joined_is_named(start):
    first, second = start(3, 0, 1)
    waits_for("process 2", first)
    second.kill()
    missing = "processes 1 (was there, on 127.0.0.1, and has ended) and 2"
    waits_for(missing, first)
    first.send_signal(signal.SIGUSR1)  # an hour passes
    code, words = last_words(first)
    assert code == 2
    assert f"{missing} did not join within 300 s" in words


@pytest.mark.long
def test_a_first_one_that_does_not_come_is_named(start):
    for process in start(3, 1, 2, join_timeout=3):
        code, words = last_words(process)
        assert code == 2 and "process 0, the coordinator at localhost:" in words


@pytest.mark.long
@pytest.mark.parametrize("which", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_one_that_ends_while_jax_connects_them_is_named(which, start):
    (victim,) = start(2, which, ends="connecting")
    (other,) = start(2, 1 - which)
    code, words = last_words(other)
    assert code == 1 and f"process {which} on " in words and "has ended" in words
    assert victim.wait() == -signal.SIGKILL


@pytest.mark.long
@pytest.mark.parametrize("which", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_one_that_ends_after_all_have_joined_is_named_and_no_other(which, start):
    processes = start(3, 0, 1, 2, seconds=300)
    for process in processes:
        joined(process)
    processes[which].kill()
    for number in {0, 1, 2} - {which}:
        code, words = last_words(processes[number])
        (line,) = [each for each in words.splitlines() if "has ended" in each]
        line = line.removeprefix("meshdsl train: ")  # which the watch writes, and the script not
        assert code == 1
        assert line.startswith(f"process {which} on ") and line.count("process ") == 1


@pytest.mark.long
@pytest.mark.parametrize("which", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_pause_that_is_too_long_names_the_one_that_stood_still(which, start):
    processes = start(2, 0, 1, seconds=300, pause_timeout=8, margin=22)
    for process in processes:
        joined(process)
    still, other = processes[which], processes[1 - which]
    still.send_signal(signal.SIGSTOP)
    began = time.monotonic()
    code, words = last_words(other)
    assert code == 1 and f"process {which} on " in words
    assert "has not answered for 8 s" in words and "--pause_timeout waits longer" in words
    time.sleep(max(0.0, began + 35 - time.monotonic()))  # longer than JAX waits with this margin
    still.send_signal(signal.SIGCONT)
    code, words = last_words(still)
    assert code == 1 and "this process stood still for " in words
    assert "and the others wait for 8 s (--pause_timeout): process " in words


@pytest.mark.long
@pytest.mark.parametrize(
    ("which", "pause"),
    [
        (1, 10),
        pytest.param(0, 45, marks=pytest.mark.slow),
        pytest.param(1, 45, marks=pytest.mark.slow),
    ],
)
def test_a_pause_is_tolerated(which, pause, start):
    processes = start(2, 0, 1, seconds=pause + 4)
    for process in processes:
        joined(process)
    processes[which].send_signal(signal.SIGSTOP)
    time.sleep(pause)
    processes[which].send_signal(signal.SIGCONT)
    for process in processes:
        code, words = last_words(process)
        assert (code, "done" in words) == (0, True), words
