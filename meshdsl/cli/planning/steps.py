"""The training step of a job as a program, lowered without running or allocating anything.

With `--remat=auto` there is a program for each choice of what the backward pass keeps, since this
choice is part of the traced step. The fastest program that fits is chosen; reports say what the
others cost.
"""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from meshdsl.cli.job import Job
from meshdsl.layouts.calibration import find_hardware
from meshdsl.layouts.layout import Layout
from meshdsl.models.remat import KINDS

if TYPE_CHECKING:
    from meshdsl.lowering.program import SpmdProgram
    from meshdsl.running.jit import Jitted


def training_step(job: Job, layout: Layout | None) -> SpmdProgram:
    """Returns the training step of a job under a layout; raises as `checked_program`."""
    program = checked_program(*jitted_step(replace(job, layout=layout)))
    if not job.decisions:
        return program
    return replace(program, decisions=(*job.decisions, *program.decisions))


def jitted_step(job: Job) -> tuple[Jitted, tuple[Any, Any]]:
    """Returns the training step of a job on its mesh, and the specs of its state and batch.

    Jobs made from one by `replace` share the traces of their steps, unless the recipe is another.
    """
    from meshdsl.running.jit import jit
    from meshdsl.training.state import spec_of

    key = id(job.recipe), job.backend
    if key not in job.steps:
        step = job.recipe.train_step()
        jitted = jit(step, job.mesh, job.layout, job.backend, donate="state", options=job.options)
        # The recipe stays, so that no other one gets its id.
        job.steps[key] = job.recipe, jitted, spec_of(job.recipe.create_state())
    _, jitted, state = job.steps[key]
    return jitted.on(job.mesh, job.layout, job.options), (state, job.batch_spec)


def decided(job: Job) -> Job:
    """Returns a job with the fastest choice that fits; itself if the user has made the choice.

    Raises:
        ValueError: the hardware is not known; or the layout does not fit the step.
    """
    from meshdsl.lowering.decisions import fastest

    if not job.remats:
        return job
    if job.options.hardware is None:
        raise ValueError(
            "--remat=auto decides by time: name the hardware, as in --hardware=v5p, or choose one "
            f"of {', '.join(KINDS)}"
        )
    hardware, memory = find_hardware(job.options.hardware), job.options.memory
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the chosen one warns when it is lowered again
        programs = {name: training_step(job.keeping(name), job.layout) for name in job.remats}
    name, decisions = fastest("remat", programs, hardware, memory)
    return replace(job.keeping(name), decisions=decisions)


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
