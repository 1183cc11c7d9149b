"""One of two processes whose data is slow in the second: `python -m ... slow_job HOST:PORT N`."""

import sys
import time

import jax

from meshdsl.optim import AdamW
from meshdsl.training import Data, Health, Recipe, Reporting, joined, train
from tests.training import classifier

PAUSE = 0.3  # seconds, many times what a step takes


def batches(process):
    for batch in classifier.endless():
        if process == 1:
            time.sleep(PAUSE)
        yield batch


def main(coordinator, process):
    jax.config.update("jax_num_cpu_devices", 1)
    with joined(coordinator, 2, process):
        train(
            Recipe(classifier.init, classifier.loss, AdamW(0.05)),
            Data(batches(process), classifier.BATCH_DIMS),
            steps=16,
            mesh="data:2",
            layout="batch:data",
            reporting=Reporting(quiet=True),
            health=Health(straggler_factor=2.0, straggler_steps=4),
        )


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
