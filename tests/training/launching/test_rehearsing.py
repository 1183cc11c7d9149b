"""Processes that compile ahead what fewer processes would run."""

import subprocess
import sys

import pytest

GIVES_WAY = """
import os, threading
from meshdsl.training.launching.rehearsing import give_way
threading.Thread(target=threading.Event().wait, daemon=True).start()
give_way()
print(*sorted(os.getpriority(os.PRIO_PROCESS, int(n)) for n in os.listdir("/proc/self/task")))
print(open("/proc/self/oom_score_adj").read())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="finds threads in /proc")
def test_all_threads_of_a_rehearsal_have_the_lowest_priority():
    """It has some by then: it has joined the others. The kernel takes its memory first."""
    run = [sys.executable, "-c", GIVES_WAY]
    # Its own session, as `launch` gives it: else all that this terminal runs would give way.
    ran = subprocess.run(run, check=True, capture_output=True, text=True, start_new_session=True)
    output = ran.stdout
    *priorities, claim = output.split()
    assert claim == "1000"
    assert len(priorities) > 1 and {*priorities} == {"19"}
