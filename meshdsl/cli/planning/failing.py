"""`meshdsl explain --failures`, `--mtbf` and `--job_mtbf`: what lost hosts cost a training step."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from absl import flags

from meshdsl.cli.mistakes.problems import Problems
from meshdsl.layouts.calibration import find_hardware

if TYPE_CHECKING:
    from meshdsl.lowering.program import SpmdProgram

# `--checkpoint_every` and `--checkpoint_minutes` are not refused without --mtbf: they are among the
# flags of a run, which `explain --config=run.toml` reads.
_OF_MTBF = ("storage_bandwidth", "restart_time")


def asks_for_failures(values: flags.FlagValues, problems: Problems) -> bool:
    """Whether the flags ask for failures; adds to the problems."""
    timed = values.mtbf is not None or values.job_mtbf is not None
    asked = bool(values.failures is True or timed)
    if values.mtbf is not None and values.job_mtbf is not None:
        problems.add("--mtbf is of one host, --job_mtbf of the whole job: give one of them")
    if values["devices_per_host"].present and not asked:
        problems.add("--devices_per_host is for --failures, --mtbf or --job_mtbf: give one of them")
    for name in _OF_MTBF:
        if values[name].present and not timed:
            problems.add(f"--{name} is for --mtbf or --job_mtbf: give one, as in --mtbf=50000h")
    if values.storage_bandwidth == 0:
        problems.add("--storage_bandwidth must be above 0")
    others = [name for name in ("html", "compare_layout", "stage", "only") if values[name].present]
    if asked and others:
        listed = " and ".join(f"--{name}" for name in others)
        problems.add(f"--failures prints a report of its own: leave out {listed}")
    return asked


def show_failures(program: SpmdProgram, values: flags.FlagValues) -> str:
    """Returns the report of a training step, as text or as JSON.

    Raises:
        ValueError: the program has no state.
    """
    from meshdsl.lowering.costs.simulation import simulate
    from meshdsl.reports.explain.explanation import stored_on
    from meshdsl.reports.failures import Costs, as_values, failures, predict, show

    device = find_hardware(values.hardware)
    report = failures(program, values.devices_per_host or device.host)
    prediction = None
    mtbf = values.mtbf
    if values.job_mtbf is not None:  # any of its hosts fails
        mtbf = values.job_mtbf * report.domains.count
    if mtbf is not None:
        costs = Costs(mtbf, values.storage_bandwidth, values.restart_time)
        step = simulate(stored_on(program, device), device).seconds
        every = values.checkpoint_every
        if every is None and values.checkpoint_minutes is not None:
            every = max(1, round(60 * values.checkpoint_minutes / step))
        prediction = predict(report, step, device, costs, every)
    if values.json:
        return json.dumps(as_values(report, prediction), indent=2)
    return show(report, prediction)
