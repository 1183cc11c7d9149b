"""The training step of a job as a program, lowered without running or allocating anything."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

from meshdsl.cli.job import Job
from meshdsl.layouts.layout import Layout

if TYPE_CHECKING:
    from meshdsl.lowering.program import SpmdProgram


def training_step(job: Job, layout: Layout | None) -> SpmdProgram:
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
