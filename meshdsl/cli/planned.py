"""The training step of a job as a program, lowered without running or allocating anything."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from meshdsl.cli.job import Job
from meshdsl.layouts.layout import Layout

if TYPE_CHECKING:
    from meshdsl.lowering.program import SpmdProgram
    from meshdsl.running.jit import Jitted


def training_step(job: Job, layout: Layout | None) -> SpmdProgram:
    """Returns the training step of a job under a layout; raises as `checked_program`."""
    return checked_program(*jitted_step(replace(job, layout=layout)))


def jitted_step(job: Job) -> tuple[Jitted, tuple[Any, Any]]:
    """Returns the training step of a job on its mesh, and the specs of its state and batch."""
    from meshdsl.running.jit import jit
    from meshdsl.training.state import spec_of

    step = job.recipe.train_step()
    jitted = jit(step, job.mesh, job.layout, job.backend, donate="state", options=job.options)
    return jitted, (spec_of(job.recipe.create_state()), job.batch_spec)


def checked_program(jitted: Jitted, specs: tuple[Any, Any]) -> SpmdProgram:
    """Returns a training step as a program.

    Raises:
        ValueError: the layout does not fit it, or has a scope that none of its paths has.
    """
    from meshdsl.layouts.validate import ScopeWarning, check_scopes

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ScopeWarning)  # an error of its own, here
        program = jitted.lower(*specs)
    check_scopes(program.layout, program.mesh, program.scopes)
    return program
