"""A process that saves twice; while it saves the second time, its clock jumps by 100,000 s.

The write of Orbax's last file is slow, so that it still goes on when the process ends.
"""

import asyncio
import sys
import threading
import time

import numpy as np

import meshdsl as md
from meshdsl.training.checkpointing.checkpoints import Checkpoints

STATE = {"w": md.named(np.arange(4096.0, dtype="f4"), ["x"])}


def main(folder):
    with Checkpoints(folder) as checkpoints:
        checkpoints.save(1, STATE)
        checkpoints.wait()
        clock, looks, to_thread = time.time, [], asyncio.to_thread

        def jumping():
            if threading.current_thread().name == "async_save":  # of Orbax, which waits for writes
                looks.append(clock())
            return clock() + 100_000 * (len(looks) > 2)  # it has looked when it began to wait

        async def slow(*given, **options):
            if "write" in threading.current_thread().name:
                await asyncio.sleep(0.5)
            return await to_thread(*given, **options)

        time.time, asyncio.to_thread = jumping, slow
        checkpoints.save(2, STATE)
        checkpoints.wait()


if __name__ == "__main__":
    try:
        main(sys.argv[1])
    except ValueError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
