"""Order of 30 layouts of a small model on this machine: predicted by a calibration, and measured.

`meshdsl calibrate` measures operations; the simulation predicts the step of each layout from them;
then all layouts run in turn, so that all meet the same disturbances. Printed are Kendall's tau
between predicted and measured times, and the median of the relative errors. Nothing is fitted to
the steps.

The clock is that of calibrations (`layouts.calibration`): the processor time of all threads over
the number of cores, the median of all rounds. The least wall time stands beside it: with other jobs
on the machine it says little.

Run: python -m meshdsl.cli.main calibrate --host_devices=8 --out=/tmp/mine.json
     python -m tests.benchmarks.calibrated_order /tmp/mine.json [--rounds=12]
"""

import argparse
import gc
import os
import statistics
import time
from dataclasses import dataclass, field

import jax
from scipy.stats import kendalltau

from meshdsl.cli import flags, job
from meshdsl.cli.planning.steps import checked_program, jitted_step
from meshdsl.cli.sweeping.measures import random_batch
from meshdsl.layouts.calibration import find_hardware
from meshdsl.lowering.costs.schedule import WORK
from meshdsl.lowering.costs.simulation import simulate
from meshdsl.ops.random import KEY, key
from meshdsl.reports.sweeps.candidates import Candidate
from meshdsl.running.jit import jit
from meshdsl.tensors.named_array import NamedArray, spec

DEVICES = 8
ARGUMENTS = ("--model=gpt_mini", "--model_args=layers=2", "--length=64", "--batch_size=16")
MESHES = ("data:4,model:2", "data:2,model:4", "data:1,model:8")
LAYOUTS = (
    "batch:data; heads:model; d_ff:model; vocab:model",
    "batch:data; heads:model; d_ff:model; vocab:model; length:model?",
    "batch:data; heads:model; d_ff:model",
    "batch:data; d_ff:model; vocab:model",
    "batch:data; heads:model",
    "batch:data; length:model",
    "batch:data; embed:model",
    "batch:data",
)
PAIRS = (
    "data:8 | batch:data",
    "data:8 | batch:data; params/embed:data",
    "data:8 | batch:data; optimizer/embed:data",
    "data:8 | length:data",
    "data:4,model:2 | batch:data; heads:model; d_ff:model; vocab:model; params/embed:data",
    "data:2,model:4 | batch:data; heads:model; d_ff:model; vocab:model; params/embed:data",
)


@dataclass
class Run:
    """One layout: its step, what is predicted, and what has been measured."""

    candidate: object
    predicted: float
    work: float
    sent: float
    step: object
    create: object
    batch: dict
    seconds: list[float] = field(default_factory=list)
    wall: list[float] = field(default_factory=list)

    @staticmethod
    def of(candidate, jitted, specs, recipe, hardware):
        """Lowers and compiles the step of a layout."""
        on = jitted.on(candidate.mesh, candidate.layout)
        program = checked_program(on, specs)
        schedule = simulate(program, hardware)
        make = recipe.create_state()
        creation = jit(lambda key: {"state": make(key)}, candidate.mesh, candidate.layout)
        create = creation.lower(spec([KEY], "uint32")).compile()
        step = program.compile()
        batch = random_batch(specs[1], 256)
        stored = step.executable.inputs[-len(batch) :]
        placed = {
            name: NamedArray(at.put(batch[name]), batch[name].dims, at.cuts)
            for name, at in zip(sorted(batch), stored, strict=True)
        }
        work = sum(e.seconds * n for e, n in schedule.walk() if e.kind == WORK)
        return Run(candidate, schedule.seconds, work, schedule.times.exposed, step, create, placed)

    def turn(self, steps, cores):
        """Runs some steps from a state of their own; keeps their times."""
        state = self.create(key(0))["state"]
        for number in range(steps + 1):
            wall, start = time.perf_counter(), time.process_time()
            state, metrics = self.step(state, self.batch)
            jax.block_until_ready(jax.tree.leaves((state, metrics)))
            if number:  # the first one is warmer
                self.seconds.append((time.process_time() - start) / cores)
                self.wall.append(time.perf_counter() - wall)


def main():
    """Prints the order."""
    parser = argparse.ArgumentParser()
    parser.add_argument("calibration")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--only", type=int, default=30, help="so many of the layouts")
    arguments = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", DEVICES)
    hardware = find_hardware(arguments.calibration)
    values, problems = flags.read(ARGUMENTS)
    described = job.build(values, problems, feeds_text=False)
    jitted, specs = jitted_step(described)
    layouts = [f"{mesh} | {layout}" for layout in LAYOUTS for mesh in MESHES]
    candidates = [
        Candidate(*(part.strip() for part in pair.split("|"))) for pair in (*PAIRS, *layouts)
    ][: arguments.only]
    cores = len(os.sched_getaffinity(0))
    runs = [Run.of(one, jitted, specs, described.recipe, hardware) for one in candidates]
    gc.collect()
    for _ in range(arguments.rounds):
        for run in runs:
            run.turn(arguments.steps, cores)
    runs.sort(key=lambda run: statistics.median(run.seconds))
    print("predicted (work + sent)      measured   error    wall  layout")
    errors = []
    for run in runs:
        measured = statistics.median(run.seconds)
        errors.append(run.predicted / measured - 1)
        print(
            f"{run.predicted * 1e3:7.1f} ({run.work * 1e3:6.1f} + {run.sent * 1e3:5.1f}) ms "
            f"{measured * 1e3:7.1f} ms {errors[-1]:+7.1%} {min(run.wall) * 1e3:7.1f}  "
            f"{run.candidate}"
        )
    measured = [statistics.median(run.seconds) for run in runs]
    predicted = [run.predicted for run in runs]
    half = [[statistics.median(run.seconds[n::2]) for run in runs] for n in (0, 1)]
    print(
        f"{len(runs)} layouts: Kendall's tau {kendalltau(predicted, measured).statistic:.3f}, "
        f"median error {statistics.median(map(abs, errors)):.1%}; two halves of the measurements "
        f"agree with tau {kendalltau(*half).statistic:.3f}"
    )


if __name__ == "__main__":
    main()
