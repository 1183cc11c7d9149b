"""Advice: the next thing to try when a program needs too much memory.

Where single changes of the step were tried (`search.changes`), it is those that help, the best
first, with their figures; `to_be_faster` has those that save time.

Of a program alone it names only what this shows: a large tensor that is replicated along an axis,
with the layout rule that would split it; or values kept for the backward pass that could be
recomputed. It promises no figures then, since other tensors change with the layout. A rule that the
layout has is not advised.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from meshdsl.lowering.costs.units import show_bytes, show_seconds
from meshdsl.lowering.program import SpmdProgram, Value

if TYPE_CHECKING:
    from meshdsl.reports.explain.explanation import Part
    from meshdsl.search.changes import Tried

_KEPT = ("activations", "working")
_MOST = 3  # changes that are listed
_LESS = 0.95  # the share of the memory from which a change is listed as use less
_SLOWER = 1.5  # what uses less may take this multiple of the time
_FASTER = 0.99  # the share of the time from which a change is listed as be faster


def advice(program: SpmdProgram, parts: Sequence[Part], changes: Sequence[Tried] = ()) -> str:
    """Returns what uses less memory, or an empty string.

    Args:
        changes: the step as it is, and with single changes, if they were tried.
    """
    if changes:
        listed = _listed(changes[0], smaller(changes))
        return f"{listed}. None of those tried fits" if listed and misfits(changes) else listed
    if program.mesh.size > 1 and not program.layout.rules:
        axis = program.mesh.names[0]
        return f"no layout: all devices do the same work. Begin with --layout=batch:{axis}"
    activations = [part for part in parts if part.part in _KEPT]
    state = [part for part in parts if part.part in ("parameters", "optimizer")]
    if _bytes(activations) > _bytes(parts) / 2:
        return _about_activations(program, activations)
    if _bytes(state) > _bytes(parts) / 3:
        return _about_state(program, state)
    return ""


def to_be_faster(changes: Sequence[Tried]) -> str:
    """Returns the changes that take less time and fit, the best first, or an empty string."""
    return _listed(changes[0], faster(changes)) if changes else ""


def faster(changes: Sequence[Tried]) -> list[Tried]:
    """Returns the changes that take less time and fit, the best first."""
    now, *rest = changes
    better = [row for row in rest if row.fits and row.seconds < _FASTER * now.seconds]
    return sorted(better, key=lambda row: (row.seconds, row.peak_bytes))


def smaller(changes: Sequence[Tried]) -> list[Tried]:
    """Returns the changes that use less memory, the best first.

    If the step fits, the best is the one with the least product of memory and time. If it does not,
    those that fit are listed, or else those with the least memory.
    """
    now, *rest = changes
    better = [row for row in rest if row.peak_bytes < _LESS * now.peak_bytes]
    if now.fits:
        better = [row for row in better if row.seconds <= _SLOWER * now.seconds]
        return sorted(better, key=lambda row: (row.seconds * row.peak_bytes, row.seconds))
    if any(row.fits for row in better):
        return sorted((row for row in better if row.fits), key=lambda row: row.seconds)
    return sorted(better, key=lambda row: row.peak_bytes)


def misfits(changes: Sequence[Tried]) -> bool:
    """Whether a step does not fit, nor by any change that was tried; False if none was."""
    return bool(changes) and not any(row.fits for row in changes)


def _listed(now: Tried, better: Sequence[Tried]) -> str:
    """Returns changes with their figures: "`embed:data`: 2.1 GiB, 1.2 s"."""
    if not better:
        return ""
    figures = [f"{row.how}: {_figures(row)}" for row in better[:_MOST]]
    return f"tried, the best first: {'; '.join(figures)} (now {_figures(now)})"


def _figures(row: Tried) -> str:
    return f"{show_bytes(row.peak_bytes)}, {show_seconds(row.seconds)}"


def _bytes(parts: Sequence[Part]) -> int:
    return sum(part.buffer.bytes for part in parts)


def _about_activations(program: SpmdProgram, activations: Sequence[Part]) -> str:
    saved = [part for part in activations if part.part == "activations"]
    again = (i for i, _ in program.block.walk() if i.op == "barrier" and len(i.inputs) > 1)
    recomputes = next(again, None) is not None
    if saved and not recomputes and _bytes(saved) > _bytes(activations) / 2:
        return (
            "most of the peak is kept for the backward pass. md.checkpoint around a layer "
            "(--remat=full for language models) computes it again instead: less memory, more time"
        )
    for part in activations:
        rule = _rule(program, part.buffer.value)
        if rule is not None:
            dim, axis, extent = rule
            named = f"`{part.name}`" if part.name else "the largest value"
            return (
                f"{named} (made at {part.buffer.source}) is the same on all {extent} devices of "
                f"axis `{axis}`; `{dim}:{axis}?` in the layout splits it there"
            )
    return ""


def _about_state(program: SpmdProgram, state: Sequence[Part]) -> str:
    """Suggests splitting the optimizer's state, else the parameters, over an axis they lack."""
    for scope, words in (("optimizer", "optimizer state"), ("parameters", "the parameters")):
        own = [part for part in state if part.part == scope]
        if _bytes(own) < _bytes(state) / 4:
            continue
        for part in own:
            rule = _rule(program, part.buffer.value)
            if rule is not None:
                dim, axis, extent = rule
                where = "params" if scope == "parameters" else scope
                return (
                    f"{words} with dim `{dim}` is the same on all {extent} devices of axis "
                    f"`{axis}`; `{where}/{dim}:{axis}` in the layout splits it there"
                )
    return ""


def _rule(program: SpmdProgram, value: Value) -> tuple[str, str, int] | None:
    """Returns (dim, axis, size of the axis) by which a value could be split further."""
    mesh, pipeline = program.mesh, program.pipeline
    busy = value.layout.split_axes | set(value.layout.partial_axes)
    if pipeline is not None:  # the stages of a pipeline have values of their own
        busy |= set(pipeline.axes)
    idle = [axis for axis, size in mesh.axes if size > 1 and axis not in busy]
    known = {(rule.dim, axis) for rule in program.layout.rules for axis in rule.axes}
    for axis in sorted(idle, key=lambda a: -mesh.sizes[a]):
        for dim in sorted(value.shape, key=lambda d: -d.size):
            free = not value.layout.axes(dim.name) and not _scanned(program, dim.name)
            taken = (dim.name, axis) in known
            if free and not taken and dim.size % mesh.sizes[axis] == 0:
                return dim.name, axis, mesh.sizes[axis]
    return None


def _scanned(program: SpmdProgram, name: str) -> bool:
    return any(i.op == "scan" and i.params["dim"] == name for i, _ in program.block.walk())
