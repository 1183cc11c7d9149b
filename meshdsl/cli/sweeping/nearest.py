"""Nearest: where no candidate of a sweep fits, which one comes nearest and what makes it fit.

What is advised was tried: each change is lowered and has its figures, by the plan.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace

from meshdsl.cli.job import Job, on_hardware
from meshdsl.cli.planning.changes import changes_of
from meshdsl.cli.planning.steps import decided, training_step
from meshdsl.cli.sweeping.measures import Subject
from meshdsl.layouts.calibration import find_hardware
from meshdsl.layouts.hardware import Hardware
from meshdsl.layouts.layout import Layout
from meshdsl.layouts.mesh import Mesh
from meshdsl.lowering.costs.simulation import step_seconds
from meshdsl.lowering.costs.units import show_bytes, show_seconds
from meshdsl.reports.explain.advice import smaller
from meshdsl.reports.sweeps.ranking import Ranked
from meshdsl.reports.sweeps.result import Result
from meshdsl.search.changes import Tried

_MOST = 3  # changes that are listed
_DOUBLED = 4  # how often the devices are doubled, from the least that could be enough


def nearest(subject: Subject, rows: Sequence[Ranked]) -> str:
    """Returns what to say where candidates have figures and none fits; else an empty text."""
    measured = [row for row in rows if not row.result.reason]
    if not measured or any(row.result.fits for row in measured):
        return ""
    rooms = {row.result.topology: subject.room(row.result.topology) for row in measured}
    row = min(measured, key=lambda row: (row.result.peak_bytes or 0) / rooms[row.result.topology])
    one, room = row.result, rooms[row.result.topology]
    needed = one.peak_bytes or 0
    few = "it does not fit" if len(measured) == 1 else f"none of {len(measured):,} fits"
    lines = [
        f"{few}; #{row.rank} comes nearest: {show_bytes(needed)}, {_times(needed / room)} the "
        f"{show_bytes(room)} of a device"
    ]
    # Changes are judged by their plans. Where the compiler needs more than the plan, so will they.
    planned = one.planned_peak_bytes or needed
    share = min(1.0, planned / needed)
    tried = _tried(subject, one, int(room * share))
    if not tried:
        return lines[0]
    now, *changes = tried
    better = smaller([now, *changes])
    fitting = [change for change in better if change.fits]
    if fitting:
        lines.append("what makes it fit, by the plan:")
    elif better:
        lines.append(f"of {len(changes)} changes none makes it fit; what helps most:")
    else:
        lines.append(f"of {len(changes)} changes none makes it smaller")
    lines += [_line(change) for change in (fitting or better)[:_MOST]]
    return "\n".join(lines)


def _times(ratio: float) -> str:
    return f"{ratio:,.0f} times" if ratio >= 10 else f"{ratio:.2f} times"


def _tried(subject: Subject, one: Result, room: int) -> list[Tried]:
    """Returns the step of a result as it is, with single changes, and on more devices.

    Args:
        room: bytes that a plan may hold.
    """
    hardware = subject.hardware(one.topology)
    job = on_hardware(subject.job, hardware) if one.topology else subject.job
    job = replace(job, mesh=Mesh.parse(one.mesh), layout=Layout.parse(one.layout))
    device = replace(find_hardware(hardware), memory_bytes=room)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the sweep has told what they say
        try:
            if job.remats:
                job = decided(job)
            program = training_step(job, job.layout)
            tried = [*changes_of(program, job, device)]
        except ValueError:  # it was lowered before, so this is about a change
            return []
        if tried and not one.topology:  # the devices of a topology are given
            tried += _on_more(job, device, math.ceil(program.peak_bytes / room))
    return tried


def _on_more(job: Job, device: Hardware, factor: int) -> Iterator[Tried]:
    """Yields the step on meshes whose first axis is longer, until one fits."""
    mesh = job.mesh
    if mesh is None or not mesh.axes:
        return
    name, size = mesh.axes[0]
    for doubled in range(_DOUBLED):
        times = 2 ** (max(1, math.ceil(math.log2(factor))) + doubled)
        larger = Mesh(((name, size * times), *mesh.axes[1:]), mesh.slow)
        try:
            changed = replace(job, mesh=larger, decisions=())
            program = training_step(changed, changed.layout)
        except ValueError:  # a dim is smaller than its axis
            return
        peak = program.peak_bytes
        how = f"--mesh_shape={str(larger).replace(' ', ',')} ({times:,} times the devices)"
        fits = peak <= device.memory_bytes
        yield Tried(how, step_seconds(program, device), peak, fits)
        if fits:
            return


def _line(change: Tried) -> str:
    return f"  {change.how}: {show_bytes(change.peak_bytes)}, {show_seconds(change.seconds)}"
