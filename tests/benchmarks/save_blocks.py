"""How long saving a checkpoint blocks training, of the time that the save takes.

Training steps go on while a checkpoint is written behind them. What blocks is the call that saves:
no step is dispatched before it returns. The devices' last step is waited for before it, since that
is no time lost. A save has ended when all is on disk, with its checksums. Steps with and without a
save beside them take turns; on CPUs they share the cores with what is written.

Run: python -m tests.benchmarks.save_blocks [--model_args=layers=8,embed=512,heads=8] [--rounds=6]
"""

import argparse
import statistics
import tempfile
import threading
import time

import jax

import meshdsl as md
from meshdsl.models import load
from meshdsl.optim import AdamW
from meshdsl.training.checkpointing.checkpoints import Checkpoints
from meshdsl.training.state import by_path, create
from meshdsl.training.step import make_train_step

WARM = 2  # rounds that compile, and that make folders
STEPS = 3  # steps of a round without a save
BATCH = (2, 64)  # sequences and tokens of each: steps that are short beside a save


class Training:
    """Steps of a model on batches of the same tokens."""

    def __init__(self, model, mesh, layout):
        optimizer = AdamW(1e-3)
        make = create(model.init, optimizer)
        init = md.jit(lambda key: {"state": make(key)}, mesh, layout)
        self.state = init(md.random.key(0))["state"]
        self.step = md.jit(make_train_step(model.loss, optimizer), mesh, layout, donate="state")
        spec = model.batch_spec(*BATCH)
        self.batch = {name: zeros(each) for name, each in spec.items()}

    def seconds(self):
        """Takes a step; returns how long it took."""
        start = time.perf_counter()
        self.state, _ = self.step(self.state, self.batch)
        jax.block_until_ready(jax.tree.leaves(self.state))
        return time.perf_counter() - start

    def bytes(self):
        return sum(array.data.nbytes for array in by_path(self.state).values())


def zeros(spec):
    return md.named(jax.numpy.zeros(spec.dims.sizes, spec.dtype), spec.dims)


def saved(checkpoints, number, training, local):
    """Saves while steps go on.

    Returns:
        The seconds of the call, of the whole save, and of each step beside it.
    """
    start = time.perf_counter()
    checkpoints.save(number, training.state, local=local)
    blocked = time.perf_counter() - start
    ended = []

    def wait():
        checkpoints.wait()
        ended.append(time.perf_counter())

    waiting = threading.Thread(target=wait)
    waiting.start()
    steps = []
    while waiting.is_alive():
        steps.append(training.seconds())
    waiting.join()
    return blocked, ended[0] - start, steps


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="gpt_mini")
    parser.add_argument("--model_args", default="layers=8,embed=512,heads=8")
    parser.add_argument("--mesh_shape")
    parser.add_argument("--layout")
    parser.add_argument("--rounds", type=int, default=6)
    given = parser.parse_args()
    model = load(given.model, given.model_args)
    training = Training(model, given.mesh_shape, given.layout)
    size = training.bytes()
    print(f"{given.model} {given.model_args}: a state of {size / 1e6:,.0f} MB", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        kinds = {"persistent": False, "local": True}
        with Checkpoints(f"{folder}/kept", keep=1, local=f"{folder}/local") as checkpoints:
            found = {kind: [] for kind in kinds}
            alone = []
            for number in range(WARM + given.rounds):
                for place, (kind, local) in enumerate(kinds.items()):
                    plain = [training.seconds() for _ in range(STEPS)]
                    result = saved(checkpoints, 2 * number + place + 1, training, local)
                    if number >= WARM:
                        alone += plain
                        found[kind].append(result)
    for kind, results in found.items():
        blocked, whole = (statistics.median(r[n] for r in results) for n in (0, 1))
        share = statistics.median(r[0] / r[1] for r in results)
        beside = statistics.median(seconds for r in results for seconds in r[2])
        print(
            f"{kind}: blocks {blocked * 1e3:.1f} ms of {whole * 1e3:,.0f} ms, {share:.1%} (most "
            f"{max(r[0] / r[1] for r in results):.1%}); a step takes {beside * 1e3:.0f} ms beside "
            f"it, {statistics.median(alone) * 1e3:.0f} ms alone",
            flush=True,
        )


if __name__ == "__main__":
    main()
