"""`meshdsl explain`: what a training step would do, without running or allocating anything."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from absl import flags

from meshdsl.cli import job as jobs
from meshdsl.cli.problems import Problems, UsageError
from meshdsl.layouts.layout import Layout
from meshdsl.lowering.options import Options

if TYPE_CHECKING:
    from meshdsl.lowering.explain import Comparison, Explanation
    from meshdsl.lowering.program import SpmdProgram


def main(values: flags.FlagValues, problems: Problems) -> None:
    """Runs the command; errors as in `train`, and where the page cannot be written."""
    from meshdsl.lowering.explain import compare, explain
    from meshdsl.lowering.explain.html.page import page

    if values.compare_layout and not values.mesh_shape:
        problems.add("--compare_layout needs a mesh: give --mesh_shape and --layout as well")
    if values.backend == "jax_auto":
        problems.add(
            "--backend: what jax_auto sends is XLA's choice, known once it is compiled; leave "
            "--backend out to see what meshdsl sends"
        )
    job = jobs.build(values, problems, feeds_text=False)
    program = _lowered(job, job.layout)
    others = {} if values.compare_layout else _others(program, job)
    report = explain(program, values.hardware, others)
    told: Explanation | Comparison = report
    if values.compare_layout:
        told = compare(report, explain(_lowered(job, values.compare_layout), values.hardware))
    if values.html:
        _write(values.html, page(told))
    else:
        print(told)


def _others(program: SpmdProgram, job: jobs.Job) -> dict[str, SpmdProgram]:
    """Returns the training step by other options."""
    from meshdsl.lowering.explain import alternatives

    def lower(options: Options) -> SpmdProgram:
        return _lowered(replace(job, options=options), job.layout)

    return alternatives(program, job.options, lower)


def _lowered(job: jobs.Job, layout: Layout | None) -> SpmdProgram:
    """Returns the training step of a job under a layout."""
    from meshdsl.jit import jit
    from meshdsl.layouts.validate import ScopeWarning, check_scopes
    from meshdsl.training.state import spec_of

    state = spec_of(job.create_state())
    jitted = jit(
        job.train_step(), job.mesh, layout, job.backend, donate="state", options=job.options
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ScopeWarning)  # an error of its own, here
        program = jitted.lower(state, job.batch_spec)
    check_scopes(program.layout, program.mesh, program.details["paths"])
    return program


def _write(name: str, text: str) -> None:
    try:
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(text, encoding="utf-8")
    except OSError as error:
        reason = (error.strerror or "it cannot be written").lower()
        raise UsageError([f"--html: cannot write {name}: {reason}"]) from error
    print(f"{name} is written: open it in a browser")
