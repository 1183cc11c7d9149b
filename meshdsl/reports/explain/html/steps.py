"""Steps: strip, memory and scale of a whole step, then its loops and intervals, folded.

A loop unfolds into the same for one iteration, and so on inwards.
"""

from __future__ import annotations

from collections.abc import Sequence

from meshdsl.layouts.mesh import Mesh
from meshdsl.lowering.costs.timeline import Interval, Timeline
from meshdsl.lowering.costs.units import show_bytes, show_flops, show_seconds, show_share
from meshdsl.reports.explain.html.curves import memory_curve, ruler
from meshdsl.reports.explain.html.elements import (
    Cell,
    Column,
    Html,
    joined,
    line,
    place,
    table,
    tag,
    value_names,
)
from meshdsl.reports.explain.html.strips import Scale, few, legend, loop_name, strip
from meshdsl.reports.explain.limits import called


def step(timeline: Timeline, mesh: Mesh, peak: int) -> Html:
    """Returns the whole step: strip, memory and scale; then every loop, and all intervals."""
    scale = Scale(timeline.seconds, peak)
    room = timeline.hardware.memory_bytes
    seconds = timeline.seconds
    return joined(
        [
            strip(timeline.intervals, mesh, scale, "the step as intervals, to scale"),
            memory_curve(timeline.intervals, scale, room),
            ruler(scale),
            tag("p", class_="told", aria_live="polite"),
            loops(timeline.intervals, mesh, seconds, peak, room),
            interval_table(timeline.intervals, seconds),
        ]
    )


def loops(
    intervals: Sequence[Interval], mesh: Mesh, total_seconds: float, peak: int, room: int
) -> Html:
    """Returns every loop of some intervals, folded: one iteration of it."""
    return joined(
        _loop(interval, mesh, total_seconds, peak, room)
        for interval in intervals
        if interval.inside
    )


def _loop(loop: Interval, mesh: Mesh, total_seconds: float, peak: int, room: int) -> Html:
    seconds = sum(interval.seconds for interval in loop.inside)
    each = f", {show_seconds(seconds)} each" if loop.count > 1 else ""
    share = show_share(loop.seconds / total_seconds) if total_seconds else ""
    scale = Scale(seconds, peak)
    return tag(
        "details",
        tag(
            "summary",
            tag("b", f"{loop.kind} {loop_name(loop)}"),
            tag("span", f" {loop.phase} ", class_="quiet"),
            place(loop.source),
            tag("span", f" {show_seconds(loop.seconds)}{each} {share}", class_="right"),
        ),
        legend({w: t / max(loop.count, 1) for w, t in loop.times.items()}, mesh),
        strip(loop.inside, mesh, scale, "one iteration, to scale"),
        memory_curve(loop.inside, scale, room, marked=False),
        ruler(scale),
        tag("p", class_="told", aria_live="polite"),
        loops(loop.inside, mesh, seconds, peak, room),
        interval_table(loop.inside, seconds),
        class_="fold",
    )


def interval_table(intervals: Sequence[Interval], total_seconds: float) -> Html:
    """Returns intervals as a table, folded."""
    columns = [
        Column("#", number=True),
        Column("phase"),
        Column("what"),
        Column("name in source"),
        Column("time", number=True),
        Column("share", number=True),
        Column("limited by"),
        Column("flops", number=True),
        Column("moved", number=True),
        Column("sent", number=True),
        Column("held", number=True),
        Column("line"),
    ]
    rows = [
        (
            Cell(str(n), n),
            one.phase,
            f"{one.kind} ×{one.count:,}" if one.count > 1 else one.kind,
            value_names(few(one.name), one.name) if one.name else None,
            Cell(show_seconds(one.seconds), one.seconds),
            Cell(show_share(one.seconds / total_seconds) if total_seconds else "–", one.seconds),
            called(one.limit),
            Cell(show_flops(one.flops) if one.flops else "", one.flops),
            Cell(show_bytes(one.bytes) if one.bytes else "", one.bytes),
            Cell(show_bytes(one.wire_bytes) if one.wire_bytes else "", one.wire_bytes),
            Cell(
                show_bytes(one.memory_bytes or 0) if one.memory_bytes else "", one.memory_bytes or 0
            ),
            line(one.source),
        )
        for n, one in enumerate(intervals, start=1)
    ]
    return tag(
        "details",
        tag("summary", f"all {len(rows)} intervals as a table"),
        table("intervals", columns, rows),
        class_="fold plain",
    )
