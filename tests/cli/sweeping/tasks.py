"""What the workers of `test_workers` do, in a module that their processes can import."""

import os
import signal
import time


def squares(setup):
    """Returns what squares a number; `setup` is said with it."""
    return lambda number: iter([(setup, number), number**2])


def deadly(setup):
    """Returns what ends its own process, as the task says, after a first message."""

    def do(task):
        yield f"began {task}"
        if task == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if task == "exit":
            os._exit(3)
        yield f"ended {task}"

    return do


def unprepared(setup):
    """Fails before the first task."""
    raise SystemExit(4)


def slow(setup):
    """Returns what tells its process and sleeps."""

    def do(task):
        yield os.getpid()
        time.sleep(600)

    return do
