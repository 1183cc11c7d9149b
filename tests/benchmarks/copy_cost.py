"""What copies of the state in memory (`--host_copies`) cost a job in which nothing fails.

    python -m tests.benchmarks.copy_cost [--model_args=layers=8,embed=512,heads=8] [--rounds=40]

Steps with a copy after each, and steps without, take turns: of a pair the order changes with each
round. A copy waits for the step's end, so that pairs are compared from the start of a step until
all of it is done. The last line has the share of a step that a copy adds: the median of the pairs,
and from where to where it is with a probability of 95 % (order statistics of the pairs). Steps
differ by more than a copy takes, so few rounds decide nothing. It also has the time of the copies
alone, and how fast this machine moves the same bytes to memory that it has used before.
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
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--memory", default="/dev/shm")
    given = parser.parse_args()
    save_blocks.BATCH = tuple(given.batch)
    training = save_blocks.Training(load(given.model, given.model_args), None, None)
    size = training.bytes()
    print(f"{given.model} {given.model_args}: a state of {size / 1e6:,.0f} MB", flush=True)
    pairs, alone, copies = [], [], []
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
                    ended = time.perf_counter()
                    checkpoints.copy(number, training.state)
                    copies.append(time.perf_counter() - ended)
                found[copied] = time.perf_counter() - start
            if turn >= WARM:
                pairs.append(found[True] / found[False])
                alone.append(found[False])
    step, each = statistics.median(alone), statistics.median(copies[WARM:])
    low, high = interval(pairs)
    print(
        f"a step takes {step * 1e3:,.0f} ms; with a copy {statistics.median(pairs) - 1:+.1%} "
        f"(95 %: {low - 1:+.1%} to {high - 1:+.1%}; {len(pairs)} rounds, "
        f"from {min(pairs) - 1:+.1%} to {max(pairs) - 1:+.1%}). "
        f"A copy alone takes {each * 1e3:.0f} ms, {each / step:.1%}. "
        f"This machine moves as many bytes in {moved(size) * 1e3:.0f} ms"
    )


def interval(values):
    """Returns between which of the values their median is with a probability of 95 %."""
    ordered = sorted(values)
    # How many of n values are below the median is binomial: n/2, and a deviation of sqrt(n)/2.
    off = round(1.96 * len(ordered) ** 0.5 / 2)
    middle = len(ordered) // 2
    return ordered[max(0, middle - off)], ordered[min(len(ordered) - 1, middle + off)]


def moved(size):
    """Returns the seconds of one copy of as many bytes, by one thread (median of 5)."""
    source, target = np.ones(size, np.uint8), np.ones(size, np.uint8)
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        np.copyto(target, source)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


if __name__ == "__main__":
    main()
