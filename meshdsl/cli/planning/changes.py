"""Single changes of a job that reports advise, tried: each is lowered and simulated."""

from __future__ import annotations

import math
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
        changes = [*single_changes(program, _counts(job, program, device), _remats(job))]
        if job.options.hardware is None:
            return try_changes(program, changes, partial(write, job=job), device)
        quick = replace(job, options=replace(job.options, hardware=None), decisions=())
        before = training_step(quick, quick.layout)
        tried = try_changes(before, changes, partial(write, job=quick), device)
        best = {one.how for rank in (faster, smaller) for one in rank(tried)[:_DECIDED]}
        chosen = [change for change in changes if change.how in best]
        return try_changes(program, chosen, partial(write, job=job), device)


def _counts(job: Job, program: SpmdProgram, device: Hardware) -> list[int]:
    """Returns other numbers of microbatches that a job may have, the most promising first.

    They are twice and half the number it has. Before these, if its step does not fit, are numbers
    with which it may: memory beside the state becomes less as microbatches become smaller.
    """
    now = job.recipe.microbatches
    state = sum(buffer.bytes for buffer in program.memory.buffers if buffer.path)
    room, rest = device.memory_bytes - state, program.peak_bytes - state
    counts = []
    if rest > room > 0:
        least = math.ceil(now * rest / room)
        # Gradients do not become less, so twice the number is tried, too.
        counts = [_next_count(job, least), _next_count(job, 2 * least)]
    counts += [2 * now, now // 2]
    return [n for n in dict.fromkeys(counts) if n and n != now and _is_valid(job, n)]


def _next_count(job: Job, least: int) -> int:
    """Returns the next number that divides the size of a job's batch; 0: there is none."""
    dims = (dim for spec in job.batch_spec.values() for dim in spec.dims)
    size = max((dim.size for dim in dims if dim.name == job.recipe.batch_dim), default=0)
    return next((n for n in range(least, size + 1) if size % n == 0), 0)


def _is_valid(job: Job, count: int) -> bool:
    """Whether a job's batch can be split into a number of microbatches."""
    try:
        check_microbatches(job.batch_spec, count, job.recipe.batch_dim)
    except ValueError:
        return False
    return True


def _remats(job: Job) -> list[str]:
    """Returns the other kinds of remat that the model of a job has."""
    own = getattr(job.model.config, "remat", None)
    return [] if own is None else [kind for kind in KINDS if kind != own]
