"""Single changes of a job that reports advise, tried: each is lowered and simulated."""

from __future__ import annotations

import warnings
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from meshdsl.cli.job import Job
from meshdsl.cli.planning.steps import training_step
from meshdsl.models.remat import KINDS
from meshdsl.training.microbatches import check_microbatches

if TYPE_CHECKING:
    from meshdsl.layouts.hardware import Hardware
    from meshdsl.lowering.program import SpmdProgram
    from meshdsl.search.changes import Change, Tried

_DECIDED = 2  # changes that save time, and that save memory, about which time decides


def changes_of(program: SpmdProgram, job: Job, device: Hardware) -> tuple[Tried, ...]:
    """Returns a job's step as it is, and by single changes of its layout and its flags.

    Where time decides about the step, deciding about each change would take too long. They are
    tried without decisions then, and time decides about the few that help most.
    """
    from meshdsl.reports.explain.advice import faster, smaller
    from meshdsl.search.changes import single_changes, try_changes

    if program.mesh.size > 1 and not program.layout.rules:
        return ()  # all devices do the same work: any layout is better

    def write(change: Change, job: Job) -> SpmdProgram:
        changed = replace(job, layout=change.layout, mesh=change.mesh, decisions=())
        if change.remat is not None:
            changed = changed.keeping(change.remat)
        if change.microbatches is not None:
            recipe = replace(changed.recipe, microbatches=change.microbatches)
            changed = replace(changed, recipe=recipe)
        return training_step(changed, changed.layout)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a change may well be one that nobody should make
        changes = [*single_changes(program, _counts(job), _remats(job))]
        if job.options.hardware is None:
            return try_changes(program, changes, partial(write, job=job), device)
        quick = replace(job, options=replace(job.options, hardware=None), decisions=())
        before = training_step(quick, quick.layout)
        tried = try_changes(before, changes, partial(write, job=quick), device)
        best = {one.how for rank in (faster, smaller) for one in rank(tried)[:_DECIDED]}
        chosen = [change for change in changes if change.how in best]
        return try_changes(program, chosen, partial(write, job=job), device)


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
