"""Values: an explanation as data for JSON, in bytes and seconds.

Sizes and bytes are those of one device. Seconds have seven digits: more of a simulation mean
nothing. Pages that show figures of many plans take them from here, so that they agree with
`meshdsl explain --json`.
"""

from __future__ import annotations

from typing import Any

from meshdsl.layouts.mesh import Mesh
from meshdsl.lowering.costs.timeline import Interval
from meshdsl.lowering.program import Value
from meshdsl.reports.explain.explanation import Explanation, Part, Traffic, input_parts
from meshdsl.reports.explain.limits import limit_of, waits_of
from meshdsl.reports.explain.pipeline import PipelineReport, facts_of, grid_cells, headline
from meshdsl.tensors.dtypes import short
from meshdsl.tracing.source import Source

_DIGITS = 7
_INPUTS = ("parameters", "optimizer", "batch")


def as_values(explanation: Explanation) -> dict[str, Any]:
    """Returns the figures of an explanation: numbers, texts, lists and dicts of these."""
    timeline, schedule = explanation.timeline, explanation.simulated
    mesh, hardware = explanation.mesh, timeline.hardware
    times = schedule.times
    return {
        "program": explanation.name,
        "mesh": str(mesh),
        "layout": str(explanation.layout),
        "devices": mesh.size,
        "hardware": hardware.title,
        "memory_bytes": hardware.memory_bytes,
        "parameters": explanation.parameter_count,
        "flops": explanation.flops,
        "dtype": None if explanation.dtype is None else str(explanation.dtype),
        "seconds": seven(schedule.seconds),
        "work_seconds": seven(times.work),
        "exposed_seconds": seven(times.exposed),
        "hidden_seconds": seven(times.hidden),
        "waits": [
            {"collective": kind, "axes": axes, "seconds": seven(seconds)}
            for (kind, axes), seconds in waits_of(schedule).items()
        ],
        "limit": limit_of(schedule, timeline),
        "at_peaks": {
            "seconds": seven(timeline.seconds),
            "overlapped_seconds": seven(timeline.overlapped_seconds),
            "times": {what: seven(seconds) for what, seconds in timeline.times.items()},
        },
        "peak_bytes": explanation.memory.peak_bytes,
        "fits": explanation.memory.peak_bytes <= hardware.memory_bytes,
        "peak_at": _line(explanation.memory.source, phase=True),
        "memory": dict(explanation.bytes_of),
        "wire_bytes": explanation.wire_bytes,
        "collectives": explanation.collectives,
        "sent": [_sent(traffic) for traffic in explanation.shown.traffic],
        "inputs": _inputs(explanation),
        "held": [_held(part, mesh) for part in explanation.shown.parts if part.part not in _INPUTS],
        "intervals": [_interval(one) for one in explanation.shown.intervals],
        "pipeline": _pipeline(explanation.pipeline),
        "faster": explanation.faster,
        "smaller": explanation.advice,
        "changes": [
            {
                "change": one.how,
                "seconds": seven(one.seconds),
                "peak_bytes": one.peak_bytes,
                "fits": one.fits,
            }
            for one in explanation.changes[1:]
        ],
        "search": explanation.search,
        "notes": list(explanation.notes),
        **({"only": explanation.only} if explanation.only else {}),
    }


def seven(number: float) -> float:
    """Returns a number with seven digits."""
    return float(f"{number:.{_DIGITS}g}")


def _line(source: Source, phase: bool = False) -> str:
    if not source.line:
        return ""
    return str(source) if phase else source.place


def _sent(traffic: Traffic) -> dict[str, Any]:
    return {
        "phase": traffic.phase,
        "collective": traffic.kind,
        "tensors": list(traffic.what),
        "dims": list(traffic.dims.names),
        "axes": list(traffic.axes),
        "count": traffic.count,
        "payload_bytes": traffic.payload_bytes,
        "wire_bytes": traffic.wire_bytes,
        "line": _line(traffic.source),
    }


def _inputs(explanation: Explanation) -> list[dict[str, Any]]:
    """Returns the parameters, the optimizer's state and the batch, and where they are."""
    kinds = input_parts([path for path, _ in explanation.inputs])
    return [
        {"part": kinds[path], "path": path, **_tensor(value, explanation.mesh)}
        for path, value in explanation.shown.inputs
    ]


def _held(part: Part, mesh: Mesh) -> dict[str, Any]:
    return {
        "part": part.part,
        "path": part.buffer.path or part.name,
        **_tensor(part.buffer.value, mesh),
        "bytes": part.buffer.bytes,
        "line": _line(part.buffer.source, phase=True),
    }


def _tensor(value: Value, mesh: Mesh) -> dict[str, Any]:
    layout = value.layout.complete()
    locals_ = layout.local(value.shape, mesh)
    return {
        "dtype": short(value.dtype),
        "dims": [
            {
                "name": dim.name,
                "size": dim.size,
                "local": local.size,
                "axes": [*layout.axes(dim.name)],
            }
            for dim, local in zip(value.shape, locals_, strict=True)
        ],
        "bytes": value.bytes,
    }


def _interval(one: Interval) -> dict[str, Any]:
    return {
        "phase": one.phase,
        "kind": one.kind,
        "name": one.name,
        "count": one.count,
        "seconds": seven(one.seconds),
        "limit": one.limit,
        "memory_bytes": one.memory_bytes,
        "line": _line(one.source),
    }


def _pipeline(report: PipelineReport | None) -> dict[str, Any] | None:
    if report is None:
        return None
    return {
        "headline": headline(report),
        "facts": facts_of(report),
        "bubble": seven(report.step_bubble),
        "forward_seconds": seven(report.forward_seconds),
        "backward_seconds": seven(report.backward_seconds),
        "stages": [" ".join(row) for row in grid_cells(report.running)],
    }
