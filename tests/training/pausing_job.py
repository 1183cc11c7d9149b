"""One process of a job that does nothing but agree with the others, several times a second.

Prints a line once it has joined, and its last words: that all is done, or what has gone wrong.
"""

import os
import signal
import sys
import time

import jax

from meshdsl.training.processes.joining import Deserted, everywhere, joined


def main(coordinator, count, index, seconds, join_timeout, pause_timeout, ends):
    jax.config.update("jax_num_cpu_devices", 1)
    if ends == "connecting":
        jax.distributed.initialize = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
    numbers = int(count), int(index), float(join_timeout), float(pause_timeout)
    try:
        with joined(coordinator, *numbers):
            print("joined", flush=True)
            end = time.monotonic() + float(seconds)
            while not everywhere(time.monotonic() >= end):
                time.sleep(0.05)
            print("done", flush=True)
    except (ValueError, Deserted) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
