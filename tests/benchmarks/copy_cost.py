"""What copies of the state in memory (`--host_copies`) cost a job in which nothing fails.

    python -m tests.benchmarks.copy_cost [--model_args=layers=8,embed=512,heads=8] [--rounds=12]

Steps with a copy after each, and steps without, take turns: of a pair the order changes with each
round. A copy waits for the step's end, so that pairs are compared from the start of a step until
all of it is done. The last line has the share of a step that a copy adds (median of the pairs), and
how fast this machine moves the same bytes.
"""

import argparse
import statistics
import tempfile
import time

import numpy as np

from meshdsl.models import load
from meshdsl.training.checkpointing.checkpoints import Checkpoints
from tests.benchmarks import save_blocks

WARM = 3  # rounds that compile, and that make files


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="gpt_mini")
    parser.add_argument("--model_args", default="layers=8,embed=512,heads=8")
    parser.add_argument("--batch", type=int, nargs=2, default=(8, 128), help="texts, and tokens")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--memory", default="/dev/shm")
    given = parser.parse_args()
    save_blocks.BATCH = tuple(given.batch)
    training = save_blocks.Training(load(given.model, given.model_args), None, None)
    size = training.bytes()
    print(f"{given.model} {given.model_args}: a state of {size / 1e6:,.0f} MB", flush=True)
    pairs, alone = [], []
    with (
        tempfile.TemporaryDirectory() as folder,
        tempfile.TemporaryDirectory(dir=given.memory) as memory,
        Checkpoints(f"{folder}/kept", keep=1, host_copies=f"{memory}/copies") as checkpoints,
    ):
        number = 0
        for turn in range(WARM + given.rounds):
            found = {}
            for copied in (True, False) if turn % 2 else (False, True):
                number += 1
                start = time.perf_counter()
                training.seconds()
                if copied:
                    checkpoints.copy(number, training.state)
                found[copied] = time.perf_counter() - start
            if turn >= WARM:
                pairs.append(found[True] / found[False])
                alone.append(found[False])
    step = statistics.median(alone)
    moved = np.empty(size, np.uint8)
    moved[:] = 1
    start = time.perf_counter()
    moved.copy()
    print(
        f"a step takes {step * 1e3:,.0f} ms; with a copy {statistics.median(pairs) - 1:+.1%} "
        f"(from {min(pairs) - 1:+.1%} to {max(pairs) - 1:+.1%}). This machine moves as many bytes "
        f"in {(time.perf_counter() - start) * 1e3:.0f} ms"
    )


if __name__ == "__main__":
    main()
