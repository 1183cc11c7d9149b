"""The share of its time that training spends waiting for data: gpt_mini on the default text.

What counts is the time inside `next` between the first measured step and the last, of all the time
between them; steps run ahead on the device meanwhile, so this is at most what data costs. The
second table reads batches alone, as fast as they come: how many steps per second data could feed.

Run: python -m tests.benchmarks.data_wait [--steps=60] [--workers=0,4] [--packing]
"""

import argparse
import time

import numpy as np

from meshdsl.models import load
from meshdsl.optim import AdamW
from meshdsl.training import Data, Recipe, Reporting, train
from meshdsl.training.data import Corpus, shuffled_batches

WARM = 10  # steps that compile and fill what is read ahead


class Timed:
    """Batches, with the time at which each was asked for and given."""

    def __init__(self, batches):
        self.batches, self.asked, self.given = batches, [], []

    def __iter__(self):
        return self

    def __next__(self):
        self.asked.append(time.perf_counter())
        batch = next(self.batches)
        self.given.append(time.perf_counter())
        return batch


def waiting(model, source, steps, workers):
    """Returns the share of the time that went to waiting, and the seconds of a step."""
    batches = shuffled_batches(source, model.batch_size, 0, workers=workers, ahead=4)
    timed = Timed(batches)
    names = source[np.arange(1)]
    train(
        Recipe(model.init, model.loss, AdamW(1e-3)),
        Data(timed, {name: ["batch", "length"] for name in names}),
        steps=WARM + steps,
        reporting=Reporting(log_every=WARM + steps, quiet=True),
    )
    batches.close()
    asked, given = np.array(timed.asked[WARM:]), np.array(timed.given[WARM:])
    total = time.perf_counter() - asked[0]
    return (given - asked).sum() / total, total / steps


def feeding(model, source, steps, workers):
    """Returns the seconds of a batch, where nothing but reading is done."""
    batches = shuffled_batches(source, model.batch_size, 0, workers=workers, ahead=4)
    for _ in range(WARM):
        next(batches)
    start = time.perf_counter()
    for _ in range(steps):
        next(batches)
    seconds = (time.perf_counter() - start) / steps
    batches.close()
    return seconds


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--workers", default="0,4")
    parser.add_argument("--packing", action="store_true")
    given = parser.parse_args()
    model = load("gpt_mini", "")
    splits = Corpus.read(None, 256).split(
        model.length, batch_size=model.batch_size, packing=given.packing
    )
    for workers in map(int, given.workers.split(",")):
        share, seconds = waiting(model, splits.train, given.steps, workers)
        alone = feeding(model, splits.train, 10 * given.steps, workers)
        print(
            f"{workers} workers: {share:.3%} of {given.steps} steps of {seconds * 1e3:.0f} ms is "
            f"waiting for data; read alone, a batch takes {alone * 1e3:.2f} ms",
            flush=True,
        )


if __name__ == "__main__":
    main()
