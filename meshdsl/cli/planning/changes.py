"""Single changes of a job that reports advise, tried: each is lowered and simulated."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import TYPE_CHECKING

from meshdsl.cli.job import Job
from meshdsl.cli.planning.steps import training_step
from meshdsl.layouts.calibration import find_hardware
from meshdsl.models.remat import KINDS
from meshdsl.training.microbatches import check_microbatches

if TYPE_CHECKING:
    from meshdsl.lowering.program import SpmdProgram
    from meshdsl.search.changes import Change, Tried


def changes_of(program: SpmdProgram, job: Job, hardware: str) -> tuple[Tried, ...]:
    """Returns a job's step as it is, and by single changes of its layout and its flags.

    Nothing is decided by time for them, so that they are compared alike, and quickly.
    """
    from meshdsl.search.changes import single_changes, try_changes

    if program.mesh.size > 1 and not program.layout.rules:
        return ()  # all devices do the same work: any layout is better
    quick = replace(job, options=replace(job.options, hardware=None), decisions=())

    def write(change: Change) -> SpmdProgram:
        changed = replace(quick, layout=change.layout, mesh=change.mesh)
        if change.remat is not None:
            changed = changed.keeping(change.remat)
        if change.microbatches is not None:
            recipe = replace(changed.recipe, microbatches=change.microbatches)
            changed = replace(changed, recipe=recipe)
        return training_step(changed, changed.layout)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a change may well be one that nobody should make
        if job.options.hardware is not None:
            program = training_step(quick, quick.layout)
        others = single_changes(program, _counts(job), _remats(job))
        return try_changes(program, others, write, find_hardware(hardware))


def _counts(job: Job) -> list[int]:
    """Returns twice and half the microbatches of a job, if they divide its batch."""
    now = job.recipe.microbatches
    found = []
    for count in (2 * now, now // 2):
        try:
            if count:
                check_microbatches(job.batch_spec, count, job.recipe.batch_dim)
                found.append(count)
        except ValueError:
            continue
    return found


def _remats(job: Job) -> list[str]:
    """Returns the other kinds of remat that the model of a job has."""
    own = getattr(job.model.config, "remat", None)
    return [] if own is None else [kind for kind in KINDS if kind != own]
