"""Simulated steps against published ones: nothing is fitted to these.

Of each row of `published_rows`, our program of the same shapes, mesh, layout and recomputing is
lowered and simulated. Beside it stand, each with one number from the other rows of its table:

* the simulated time, scaled;
* the trivial prediction: the same share of the peak for all rows.

Run: python -m tests.benchmarks.published [part of a row's table or name]
"""

import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import meshdsl as md
from meshdsl import optim
from meshdsl.layouts.hardware import Hardware
from meshdsl.lowering.costs.simulation import simulate
from meshdsl.lowering.options import Options
from meshdsl.lowering.program import SpmdProgram
from meshdsl.models.transformer import transformer
from meshdsl.training.state import create, spec_of
from meshdsl.training.step import make_train_step
from tests.benchmarks.published_rows import Row, all_rows

OPTIMIZER = optim.AdamW(1e-3, weight_decay=0.1)


@dataclass(frozen=True)
class Prediction:
    """A row with what is predicted for it, in seconds."""

    row: Row
    seconds: float

    @property
    def ratio(self) -> float:
        """The predicted time over the measured one."""
        return self.seconds / self.row.seconds

    @property
    def share(self) -> float:
        """The share of the peak that the measured step has."""
        return self.row.flops / self.row.seconds / _peak(self.row.hardware)


def _peak(hardware: Hardware) -> float:
    return hardware.flops[2]


def program_of(row: Row, remat: str) -> SpmdProgram:
    """Returns our training step of a row, lowered."""
    model = transformer(row.name, replace(row.config, remat=remat), row.batch, row.length)
    step = make_train_step(model.loss, OPTIMIZER)
    options = Options(**row.options)
    function = md.jit(step, row.mesh, row.layout, "jax", donate="state", options=options)
    state = spec_of(create(model.init, OPTIMIZER))
    return function.lower(state, model.batch_spec(row.batch, row.length))


def predict(row: Row) -> Prediction:
    """Returns the simulated time of a row."""
    programs = [program_of(row, remat) for remat in row.remats]
    times = [simulate(program, row.hardware, row.fused).seconds for program in programs]
    return Prediction(row, statistics.fmean(times))


def left_out(values: Sequence[float]) -> list[float]:
    """Returns for each value the one of the others that has the least mean error for these.

    The error of x for y is |y / x - 1|.
    """
    found = []
    for at in range(len(values)):
        others = [*values[:at], *values[at + 1 :]]
        found.append(
            min(others, key=lambda one: statistics.fmean(abs(y / one - 1) for y in others))
        )
    return found


def errors(predictions: Sequence[Prediction]) -> tuple[list[float], list[float], list[float]]:
    """Returns the relative errors: zero-shot, with one scalar, and of one share of the peak."""
    ratios, shares = [one.ratio for one in predictions], [one.share for one in predictions]
    plain = [ratio - 1 for ratio in ratios]
    scaled = [ratio / scalar - 1 for ratio, scalar in zip(ratios, left_out(ratios), strict=True)]
    trivial = [share / guess - 1 for share, guess in zip(shares, left_out(shares), strict=True)]
    return plain, scaled, trivial


def mean(values: Sequence[float]) -> float:
    """Returns the mean size of relative errors."""
    return statistics.fmean(map(abs, values))


def main() -> None:
    """Prints all rows, and the mean errors of the tables."""
    wanted = sys.argv[1] if len(sys.argv) > 1 else ""
    tables: dict[str, list[Prediction]] = {}
    start = time.process_time()
    for row in all_rows():
        if wanted in f"{row.table}: {row.name}":
            tables.setdefault(row.table, []).append(predict(row))
    seconds = time.process_time() - start
    every: list[tuple[float, float, float]] = []
    print("measured predicted   error  1 scalar  1 share of the peak")
    for table, predictions in tables.items():
        if len(predictions) < 2:
            print(f"{table}: {predictions[0].ratio - 1:+.1%}")
            continue
        print(f"\n{table}")
        found = list(zip(*errors(predictions), strict=True))
        every += found
        for one, (plain, scaled, trivial) in zip(predictions, found, strict=True):
            print(
                f"{one.row.seconds:7.3f}s {one.seconds:8.3f}s {plain:+7.1%}  {scaled:+8.1%}  "
                f"{trivial:+8.1%}  {one.row.name}"
            )
        print("mean error, {} rows: {:.1%}, {:.1%}, {:.1%}".format(len(found), *_means(found)))
    if every:
        print("\nall {} rows: {:.1%}, {:.1%}, {:.1%}".format(len(every), *_means(every)))
    print(f"{seconds:.0f} s of processor time")


def _means(found: Sequence[tuple[float, float, float]]) -> list[float]:
    return [mean(column) for column in zip(*found, strict=True)]


if __name__ == "__main__":
    main()
