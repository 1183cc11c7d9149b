"""`meshdsl explain`: what a training step would do, without running or allocating anything."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

from absl import flags

from meshdsl.cli import job as jobs
from meshdsl.cli.mistakes.calibrated import check_machine
from meshdsl.cli.mistakes.problems import Problems
from meshdsl.cli.plan import machine_of
from meshdsl.cli.planning.automatic import described_machine, settled
from meshdsl.cli.planning.changes import changes_of
from meshdsl.cli.planning.commands import search_command
from meshdsl.cli.planning.decoding import asks_for_decoding
from meshdsl.cli.planning.failing import asks_for_failures, show_failures
from meshdsl.cli.planning.pages import write_page
from meshdsl.cli.planning.pipeline_tables import show_table
from meshdsl.cli.planning.searched import settle
from meshdsl.cli.planning.steps import decided, jitted_step, training_step
from meshdsl.layouts.calibration import find_hardware
from meshdsl.lowering.options import Options

if TYPE_CHECKING:
    from meshdsl.lowering.program import SpmdProgram
    from meshdsl.reports.explain import Comparison, Explanation


# `--json` and `--html` are among them: a table is text, or a CSV file.
_NOT_OF_TABLES = (
    *("only", "decode", "stage", "compare_layout", "html", "json"),
    *("failures", "mtbf", "job_mtbf"),
)


def main(values: flags.FlagValues, problems: Problems) -> None:
    """Runs the command; raises as `train`, and if the page cannot be written."""
    from meshdsl.reports.explain import compare, explain
    from meshdsl.reports.explain.advice import misfits
    from meshdsl.reports.explain.html.page import page

    if values.pipeline_table:
        if given := [name for name in _NOT_OF_TABLES if values[name].present]:
            listed = " and ".join(f"--{name}" for name in given)
            problems.add(f"--pipeline_table prints a table alone: leave out {listed}")
        print(show_table(values, problems), end="")
        return
    if values.compare_layout and not values.mesh_shape:
        problems.add("--compare_layout needs a mesh: give --mesh_shape and --layout as well")
    if values.backend == "jax_auto":
        problems.add(
            "--backend: what jax_auto sends is XLA's choice, known once it is compiled; leave "
            "--backend out to see what meshdsl sends"
        )
    if values.stage and (values.compare_layout or values.html):
        problems.add("--stage prints one stage as text: leave out --compare_layout and --html")
    if values.json is True and (values.compare_layout or values.html or values.stage):
        problems.add("--json prints one report: leave out --compare_layout, --html and --stage")
    if values.only and (values.compare_layout or values.stage):
        problems.add("--only selects rows of one report: leave out --compare_layout and --stage")
    shows_failures = asks_for_failures(values, problems)
    decodes = asks_for_decoding(values, problems)
    check_machine(values, problems)
    if decodes:
        problems.check()
    chosen = settled(values, problems, described_machine)
    if chosen is not None:
        settle(values, {"hardware": chosen.asked["hardware"]})  # by whose time it was chosen
        print(chosen.says, file=sys.stderr if values.json else sys.stdout)
    elif values.topology is not None or values["slices"].present:
        _use_topology(values, problems)
    asked = jobs.on_given_hardware(jobs.build(values, problems, feeds_text=False), values)
    if decodes:
        _show_decoding(values, asked, problems)
        return
    job = decided(asked)
    if values.stage:
        from meshdsl.reports.stages import show_stage

        jitted, specs = jitted_step(job)
        print(show_stage(jitted.stages(*specs), values.stage))
        return
    program = training_step(job, job.layout)
    if shows_failures:
        print(show_failures(program, values))
        return
    others = {} if values.compare_layout or values.json else _others(program, job)
    device = find_hardware(values.hardware)
    changes = () if values.compare_layout else changes_of(program, job, device)
    report = explain(program, values.hardware, others, changes)
    if misfits(changes):
        report = replace(report, search=search_command(values))
    if values.only:
        report = replace(report, only=values.only)
        report.shown.check()
    shown: Explanation | Comparison = report
    if values.compare_layout:
        other = decided(replace(asked, layout=values.compare_layout))
        shown = compare(report, explain(training_step(other, other.layout), values.hardware))
    if values.html:
        write_page(values.html, page(shown))
    elif values.json:
        from meshdsl.reports.explain.values import as_values

        print(json.dumps(as_values(report), indent=2))
    else:
        print(shown)


def _show_decoding(values: flags.FlagValues, job: jobs.Job, problems: Problems) -> None:
    """Prints or writes the report of a step of decoding."""
    from meshdsl.cli.planning.decoding import decoded, decoding_step
    from meshdsl.reports.explain import explain
    from meshdsl.reports.explain.html.page import page
    from meshdsl.reports.explain.values import as_values

    report = explain(decoding_step(job, problems), values.hardware)
    figures = decoded(report, job)
    report = replace(report, notes=(*figures.notes, *report.notes), only=values.only)
    report.shown.check()
    if values.html:
        write_page(values.html, page(report))
    elif values.json:
        print(json.dumps({**as_values(report), "decode": figures.as_values()}, indent=2))
    else:
        print(report)


def _use_topology(values: flags.FlagValues, problems: Problems) -> None:
    """Sets the hardware to that of `--topology`, as `compile` does; adds to the problems."""
    if values.topology is None:
        problems.add("--slices are those of a --topology, which is missing")
        return
    machine = machine_of(values, problems)
    if machine is not None and values.mesh_shape is None:
        problems.add(
            f"--topology: {machine.title} need a mesh: give --mesh_shape and --layout, or "
            "--mesh_shape=auto to have them found"
        )
    if machine is not None:
        settle(values, {"hardware": machine.hardware})


def _others(program: SpmdProgram, job: jobs.Job) -> dict[str, SpmdProgram]:
    """Returns programs of the training step with other options, by their names."""
    from meshdsl.reports.explain import alternatives

    def lower(options: Options) -> SpmdProgram:
        return training_step(replace(job, options=options), job.layout)

    return alternatives(program, job.options, lower)
