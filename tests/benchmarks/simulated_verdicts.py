"""Simulated steps beside the TPU compiler's verdict on the same programs; nothing is fitted to it.

The simulation has the cycles of single operations; the compiler schedules the step. Both have all
scores of a layer's attention computed at once, as `tests.benchmarks.verdicts` says. Errors are
those of the simulated step, and of the waits for what is sent as shares of the compiler's step.

Run: python -m tests.benchmarks.verdicts --out=FILE --kind=jax     (compiles what is missing)
     python -m tests.benchmarks.simulated_verdicts FILE [--pair=NAME ...]
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from meshdsl.layouts.hardware import hardware
from meshdsl.layouts.topologies import Topology
from meshdsl.lowering.costs.simulation import simulate
from tests.benchmarks.pairs import TOPOLOGY
from tests.benchmarks.verdicts import (
    OURS,
    Job,
    Verdict,
    of_ours,
    pairs,
    read,
    without_kernels,
)

MILLISECONDS = 1e3


@dataclass(frozen=True)
class Simulated:
    """What is simulated for a pair, in seconds, beside the compiler's verdict."""

    pair: str
    step: float
    exposed: float
    verdict: Verdict

    @property
    def error(self) -> float:
        """The relative error of the step."""
        return self.step / self.verdict.step - 1

    @property
    def error_of_waits(self) -> float:
        """The error of the waits, as a share of the compiler's step."""
        return (self.exposed - self.verdict.exposed) / self.verdict.step


def simulated(pair: str, verdict: Verdict) -> Simulated:
    """Returns the simulated step of a pair, without kernels of attention."""
    schedule = simulate(of_ours(pairs()[pair]), hardware(Topology.parse(TOPOLOGY).name))
    return Simulated(pair, schedule.seconds, schedule.times.exposed, verdict)


def table(rows: Iterable[Simulated]) -> str:
    """Returns the table, with the errors of all pairs."""
    rows = list(rows)
    lines = [f"{'':24s}{'step ms':>9s}{'compiler':>9s}{'error':>8s}{'waits':>8s}{'error':>8s}"]
    for one in rows:
        step, exposed, expected = (
            MILLISECONDS * seconds for seconds in (one.step, one.exposed, one.verdict.step)
        )
        lines.append(
            f"{one.pair:24s}{step:9.2f}{expected:9.2f}{one.error:+8.1%}"
            f"{exposed:8.2f}{one.error_of_waits:+8.1%}"
        )
    steps = sorted(abs(one.error) for one in rows)
    waits = [abs(one.error_of_waits) for one in rows]
    lines.append(
        f"{len(rows)} pairs: median error {statistics.median(steps):.1%}, largest {steps[-1]:.1%}; "
        f"of the waits {statistics.median(waits):.1%} and {max(waits):.1%} of the step"
    )
    return "\n".join(lines)


def main() -> None:
    """Prints the table of all pairs in a file of verdicts."""
    parser = argparse.ArgumentParser()
    parser.add_argument("file", type=Path, help="what `tests.benchmarks.verdicts --out` wrote")
    parser.add_argument("--pair", action="append", choices=[*pairs()], help="leave out for all")
    arguments = parser.parse_args()
    known = read(arguments.file)
    without_kernels()
    jobs = ((name, Job(name, OURS, "recommended")) for name in arguments.pair or pairs())
    print(table(simulated(name, known[job]) for name, job in jobs if job in known))


if __name__ == "__main__":
    main()
