"""Advice: the next thing to try when a program needs too much memory.

It names only what the program shows: a large tensor that is replicated along an axis, with the
layout rule that would split it; or values kept for the backward pass that could be recomputed. It
promises no figures, since other tensors change with the layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from meshdsl.lowering.program import SpmdProgram, Value

if TYPE_CHECKING:
    from meshdsl.reports.explain.explanation import Part

_KEPT = ("activations", "working")


def advice(program: SpmdProgram, parts: Sequence[Part]) -> str:
    """Returns one suggestion about the part that holds most, or an empty string."""
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
    for axis in sorted(idle, key=lambda a: -mesh.sizes[a]):
        for dim in sorted(value.shape, key=lambda d: -d.size):
            free = not value.layout.axes(dim.name) and not _scanned(program, dim.name)
            if free and dim.size % mesh.sizes[axis] == 0:
                return dim.name, axis, mesh.sizes[axis]
    return None


def _scanned(program: SpmdProgram, name: str) -> bool:
    return any(i.op == "scan" and i.params["dim"] == name for i, _ in program.block.walk())
