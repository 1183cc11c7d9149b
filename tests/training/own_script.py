"""A script of a user's own, for several processes: it trains, and tells which examples it read."""

import json
import sys

import jax

from meshdsl.optim import AdamW
from meshdsl.training import BatchRamp, Data, Evaluation, Recipe, Reporting, joined, train
from meshdsl.training.data import ordered_batches, shuffled_batches
from tests.training import classifier

STEPS = 4
SIZES = [8, 8, 16, 16]


class Noting:
    """Examples that note which of them were picked, at a time."""

    def __init__(self, arrays):
        self.arrays = arrays
        self.picked = []

    def __len__(self):
        return len(self.arrays)

    def __getitem__(self, rows):
        self.picked.append(rows.tolist())
        return self.arrays[rows]


def examples(seed):
    return Noting(classifier.examples(4, seed))


def run(mesh=None, layout=None, backend="jax"):
    source, held_out = examples(0), examples(9)
    batches = shuffled_batches(source, 16, seed=3)
    result = train(
        Recipe(classifier.init, classifier.loss, AdamW(0.05)),
        Data(batches, classifier.BATCH_DIMS, BatchRamp(8, 8, 16)),
        steps=STEPS,
        mesh=mesh,
        layout=layout,
        backend=backend,
        evaluation=Evaluation(ordered_batches(held_out, 16, 2)),
        reporting=Reporting(quiet=True),
    )
    return result, source.picked, held_out.picked


def main(coordinator, processes, index, mesh, layout):
    jax.config.update("jax_num_cpu_devices", 4 // int(processes))
    with joined(coordinator, int(processes), int(index)):
        result, picked, held_out = run(mesh, layout)
    told = {"losses": result.losses, "eval": result.history[-1]["eval_loss"]}
    print(json.dumps({**told, "picked": picked, "held_out": held_out}))


if __name__ == "__main__":
    main(*sys.argv[1:])
