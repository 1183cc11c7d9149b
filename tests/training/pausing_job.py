"""One process of a job that does nothing but agree with the others, several times a second.

Prints a line once it has joined, and its last words: that all is done, or what has gone wrong.
While it waits for others, it says so often, and its clock runs ahead by an hour at SIGUSR1.
"""

import os
import signal
import sys
import time
from types import SimpleNamespace

import jax

from meshdsl.training.processes import joining, meeting
from meshdsl.training.processes.joining import Deserted, everywhere, joined


def main(coordinator, count, index, seconds, join_timeout, pause_timeout, ends, margin):
    jax.config.update("jax_num_cpu_devices", 1)
    if ends == "connecting":
        jax.distributed.initialize = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
    joining._MARGIN = int(margin)
    ahead = [0]
    signal.signal(signal.SIGUSR1, lambda *_: ahead.append(3600))
    monotonic = time.monotonic
    meeting.time = SimpleNamespace(monotonic=lambda: monotonic() + sum(ahead), sleep=time.sleep)
    meeting._REPORT_AFTER = meeting._REPORT_EVERY = 0.2
    numbers = int(count), int(index), float(join_timeout), float(pause_timeout)
    try:
        with joined(coordinator, *numbers):
            print("joined", flush=True)
            end = time.monotonic() + float(seconds)
            while not everywhere(time.monotonic() >= end):
                time.sleep(0.05)
            print("done", flush=True)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    except Deserted as error:
        print(error, file=sys.stderr, flush=True)
        os._exit(1)  # JAX may hang as it leaves
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
