"""Processes that do tasks: all messages arrive, and one that dies takes no other with it."""

import os
import subprocess
import sys
import time

import pytest

from meshdsl.cli.sweeping.workers import Died, perform
from tests.cli.sweeping import tasks

KILLED = "the process that measured it was ended by SIGKILL (as when the machine is out of memory)"
EXITED = "the process that measured it ended with exit code {}; its last words are above"
OWNER = """
from meshdsl.cli.sweeping.workers import perform
from tests.cli.sweeping import tasks
if __name__ == "__main__":
    for task, message in perform(["one", "two"], 2, tasks.slow, None):
        print(message, flush=True)
"""


@pytest.mark.parametrize("count", [1, 2])
def test_every_task_is_done_once(count):
    found = list(perform(range(5), count, tasks.squares, "setup"))
    for number in range(5):
        messages = [message for task, message in found if task == number]
        assert messages == [("setup", number), number**2]
    assert len(found) == 10


def test_a_process_that_dies_is_reported_and_the_others_go_on():
    found = list(perform(["kill", "a", "exit", "b"], 1, tasks.deadly, None))
    assert found == [
        ("kill", "began kill"),
        ("kill", Died(KILLED)),
        ("a", "began a"),
        ("a", "ended a"),
        ("exit", "began exit"),
        ("exit", Died(EXITED.format(3))),
        ("b", "began b"),
        ("b", "ended b"),
    ]


def test_a_process_that_cannot_begin_is_reported_for_every_task():
    found = list(perform(["a", "b"], 1, tasks.unprepared, None))
    assert found == [("a", Died(EXITED.format(4))), ("b", Died(EXITED.format(4)))]


def gone(process):
    """Returns whether a process ends within a while."""
    for _ in range(2400):
        try:
            os.kill(process, 0)
        except ProcessLookupError:
            return True
        with open(f"/proc/{process}/stat") as file:
            if file.read().rpartition(")")[2].split()[0] == "Z":  # not yet waited for
                return True
        time.sleep(0.05)
    return False


def test_whoever_stops_listening_ends_the_workers():
    messages = perform(["one"], 1, tasks.slow, None)
    process = next(messages)[1]
    messages.close()
    assert gone(process)


@pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="looks into /proc")
def test_workers_end_with_the_process_that_started_them(tmp_path):
    (tmp_path / "owner.py").write_text(OWNER)
    owner = subprocess.Popen(
        [sys.executable, str(tmp_path / "owner.py")],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.getcwd()},
    )
    with owner:
        processes = [int(owner.stdout.readline()) for _ in range(2)]
        owner.kill()
    assert all(gone(process) for process in processes)
