"""Schedules: a step of one device by its work and its waits, drawn as the step at the peaks is.

A device's own time is its work, and its waits for collectives. What of a collective is hidden takes
no room on the strip. Work with a product of matrices has the colour of products, other work that of
memory.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable, Iterator, Mapping

from meshdsl.layouts.hardware import Hardware
from meshdsl.layouts.mesh import Mesh
from meshdsl.lowering.costs.schedule import WORK, Event, Schedule
from meshdsl.lowering.costs.timeline import Interval, Timeline, over
from meshdsl.lowering.costs.units import show_seconds, show_share
from meshdsl.reports.explain.html.elements import Cell, Column, Html, byte_cell, joined, table, tag
from meshdsl.reports.explain.html.steps import step
from meshdsl.reports.explain.html.strips import legend
from meshdsl.tracing.source import Source


def as_timeline(schedule: Schedule, hardware: Hardware, mesh: Mesh) -> Timeline:
    """Returns a schedule as intervals that follow each other: its work and its waits."""
    intervals = tuple(_intervals(schedule.events, mesh))
    return Timeline(hardware, hardware.slow_axes(mesh), intervals)


def programs(schedules: Mapping[str, Schedule], hardware: Hardware, mesh: Mesh) -> Html:
    """Returns the steps of several programs: a table of their times, and each as a strip."""
    columns = [
        Column("program"),
        *(Column(head, number=True) for head in ("step", "work", "exposed", "hidden")),
        *(Column(head, number=True) for head in ("sent", "asynchronous", "beside products")),
    ]
    rows = [_row(name, schedule) for name, schedule in schedules.items()]
    drawn = [
        tag(
            "details",
            tag("summary", tag("b", name), f" {show_seconds(schedule.seconds)}"),
            _drawn(as_timeline(schedule, hardware, mesh), mesh),
            class_="fold",
            open=number == 0,
        )
        for number, (name, schedule) in enumerate(schedules.items())
    ]
    return joined([table("programs", columns, rows, filtered=False), *drawn])


def _drawn(timeline: Timeline, mesh: Mesh) -> Html:
    return joined([legend(timeline.times, mesh), step(timeline, mesh, 0)])


def _row(name: str, schedule: Schedule) -> list[Cell | str]:
    times = schedule.times
    sent = times.wire_bytes or 1.0
    seconds = (schedule.seconds, times.work, times.exposed, times.hidden)
    shares = (schedule.asynchronous_bytes / sent, schedule.bytes_beside_products / sent)
    return [
        name,
        *(Cell(show_seconds(each), each) for each in seconds),
        byte_cell(times.wire_bytes),
        *(Cell(show_share(share), share) for share in shares),
    ]


def _intervals(events: Iterable[Event], mesh: Mesh) -> Iterator[Interval]:
    for event in events:
        inside = tuple(_intervals(event.inside, mesh))
        times = _times(event, inside, mesh)
        if not any(times.values()):
            continue
        yield Interval(
            kind="local" if event.kind == WORK else event.kind,
            name=event.name,
            source=_source(event),
            phase="",
            count=event.count,
            times=times,
            axes=event.axes,
            wire_bytes=event.wire_bytes,
            inside=inside,
        )


def _times(event: Event, inside: Iterable[Interval], mesh: Mesh) -> dict[str, float]:
    """Returns the device's seconds by what takes them."""
    if event.kind == WORK:
        return {"compute" if event.product else "memory": event.seconds}
    if event.axes:
        return {over(event.axes, mesh): event.exposed}
    totals: collections.Counter[str] = collections.Counter()
    for interval in inside:
        for limit, seconds in interval.times.items():
            totals[limit] += event.count * seconds  # type: ignore[assignment]
    return dict(totals)


def _source(event: Event) -> Source:
    file, _, line = event.source.rpartition(":")
    return Source(file, int(line)) if file and line.isdecimal() else Source("", 0)
