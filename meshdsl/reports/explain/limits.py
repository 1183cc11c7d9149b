"""Limits: what a step spends its time on, in words, and the next thing to try.

Like all advice, this names only what can be read off the program, and promises no figures.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from meshdsl.lowering.costs.flops import instruction_flops
from meshdsl.lowering.costs.schedule import Schedule
from meshdsl.lowering.costs.timeline import LOCAL, Timeline, over
from meshdsl.lowering.costs.units import show_bytes, show_seconds, show_share
from meshdsl.lowering.decisions import ROOM
from meshdsl.lowering.program import SpmdProgram
from meshdsl.tensors.dtypes import BFLOAT16

if TYPE_CHECKING:
    from meshdsl.reports.explain.explanation import Explanation, Traffic

_PRODUCTS = ("einsum", "convolve", "attention")
_FLOAT32 = np.dtype("float32")
_HALF = "--policy=params=float32,compute=bfloat16"


def what_limits(timeline: Timeline) -> str:
    """Returns what takes most of a step: `memory bandwidth (41 % of the time)`."""
    if not timeline.seconds:
        return "nothing"
    part = show_share(timeline.times[timeline.limit] / timeline.seconds)
    return f"{called(timeline.limit)} ({part} of the time)"


def waits_of(schedule: Schedule) -> dict[tuple[str, str], float]:
    """Returns the seconds of waiting by the kind of collective and its axes, the longest first."""
    return {
        (kind, axes): times.exposed
        for (kind, axes), times in schedule.by(lambda e: (e.kind, "+".join(e.axes)))
        if times.exposed > 0
    }


def limit_of(schedule: Schedule, timeline: Timeline) -> str:
    """Returns what takes most of a simulated step: its longest wait, or the work."""
    (kind, axes), seconds = next(iter(waits_of(schedule).items()), (("", ""), 0.0))
    if seconds > schedule.times.work:
        return f"waiting for {kind} over {axes} ({show_share(seconds / schedule.seconds)})"
    return what_limits(timeline)


def called(what: str) -> str:
    """Returns the words for what takes time."""
    words = {"compute": "products of matrices", "memory": "memory bandwidth"}
    kind = "axes" if "+" in what else "axis"
    return words.get(what) or f"the network {what.replace('over ', f'over {kind} ')}"


def step_time(explanation: Explanation) -> str:
    """Returns one sentence about the time of a step."""
    timeline = explanation.timeline
    text = f"{show_seconds(timeline.seconds)} per step"
    if explanation.traffic:
        best = show_seconds(timeline.overlapped_seconds)
        text += f" ({best} if all that is sent travels beside the work)"
    return f"{text}; most is spent on {what_limits(timeline)}"


def simulated_time(explanation: Explanation) -> str:
    """Returns one sentence about the simulated time of a step."""
    schedule = explanation.simulated
    times = schedule.times
    text = f"{show_seconds(schedule.seconds)} per step: {show_seconds(times.work)} of work"
    if explanation.traffic:
        text += f" and {show_seconds(times.exposed)} of waiting for what is sent"
    if times.hidden:
        text += f"; {show_seconds(times.hidden)} of sending is hidden by work"
    text += f". Costs of work: {schedule.origin}"
    if schedule.estimated:
        by: dict[str, list[str]] = {}
        for op, instead in sorted(schedule.estimated.items()):
            by.setdefault(instead, []).append(op)
        kinds = "; ".join(f"{', '.join(ops)} as {instead}" for instead, ops in by.items())
        share = show_share(schedule.estimated_seconds / schedule.seconds)
        text += f". Not among them, and estimated: {kinds} ({share} of the step)"
    return text


def too_large(explanation: Explanation) -> str:
    """Returns what to say if the peak is more than a device has, else an empty string."""
    peak, room = explanation.memory.peak_bytes, explanation.timeline.hardware.memory_bytes
    if peak <= room:
        return ""
    return f"does not fit: {explanation.timeline.hardware.title} has {show_bytes(room)}"


def room(explanation: Explanation) -> str:
    """Returns the memory that a device has, and whether the peak fits: `of 95.0 GiB: fits`."""
    memory, peak = explanation.timeline.hardware.memory_bytes, explanation.memory.peak_bytes
    fits = "fits" if peak <= ROOM * memory else "fits, if the compiler needs no more than planned"
    return f"of {show_bytes(memory)}: {'does not fit' if too_large(explanation) else fits}"


def faster(program: SpmdProgram, timeline: Timeline, traffic: Sequence[Traffic]) -> str:
    """Returns suggestions about what takes most of the step and its dtype, or an empty string."""
    suggestions = [_about_network(program, timeline, traffic), in_half_precision(program, timeline)]
    return "; ".join(filter(None, suggestions))


def in_half_precision(program: SpmdProgram, timeline: Timeline) -> str:
    """Returns what half precision does for a step of float32, or an empty string.

    The string is empty if the hardware has no products of half precision.
    """
    hardware = timeline.hardware
    if dtype_of_products(program) != _FLOAT32 or BFLOAT16.itemsize not in hardware.flops:
        return ""
    quick = hardware.peak(BFLOAT16) / hardware.peak(_FLOAT32)
    if timeline.limit == "compute" and quick > 1:
        return f"{_HALF} multiplies {quick:.1f} times as fast"
    return f"half precision moves half the bytes ({_HALF})"


def _about_network(program: SpmdProgram, timeline: Timeline, traffic: Sequence[Traffic]) -> str:
    """Returns one suggestion about the axes of the mesh, or an empty string."""
    limit, hardware = timeline.limit, timeline.hardware
    used = {axis for rule in program.layout.rules for axis in rule.axes}
    for axis, size in program.mesh.axes:
        if size > 1 and used and axis not in used:
            return f"no rule splits a dim over axis `{axis}`: its {size:,} devices do the same work"
    if limit in LOCAL:
        return ""
    inputs = zip(program.block.inputs, program.input_paths, strict=True)
    limiting = [t for t in traffic if over(t.axes, program.mesh) == limit]
    if not limiting:
        return ""
    most = max(limiting, key=lambda t: t.wire_bytes)
    dims = f"[{','.join(most.dims.names)}]" if most.dims else ""
    text = (
        f"most of that is the {most.kind} of {most.what[0]} {dims} at {most.source.place}"
    ).replace("  ", " ")
    too_wide = timeline.slow.intersection(most.axes) - program.mesh.slow
    weights = [frozenset(v.shape) for v, path in inputs if "params" in path.split("/")]
    if most.dims and any(frozenset(most.dims) <= shape for shape in weights):
        text += "; a larger batch sends no more of it, and spreads it over more work"
    elif too_wide:
        text += f"; the fast network joins {hardware.joined:,} devices: keep this axis inside them"
    else:
        text += "; with more devices on other axes and fewer on this one, each sends less"
    return text


def dtype_of_products(program: SpmdProgram) -> np.dtype | None:
    """Returns the dtype of the operands of most products, by their flops; None: there are none."""
    flops: dict[np.dtype, int] = {}
    for instruction, times in program.block.walk():
        if instruction.op in _PRODUCTS:
            dtype = instruction.inputs[0].dtype
            flops[dtype] = flops.get(dtype, 0) + times * instruction_flops(instruction)
    return max(flops, key=lambda dtype: flops[dtype], default=None)
