"""Strips: a row of intervals drawn to scale, coloured by what takes their time.

Loops are one segment with bands for what takes their time. Segments too narrow to see are joined
with their neighbours. The phases are a band above, in shades that a legend names: a phase may be
too narrow for its name.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from meshdsl.layouts.mesh import Mesh
from meshdsl.lowering.costs.timeline import Interval
from meshdsl.lowering.costs.units import show_bytes, show_flops, show_seconds, show_share
from meshdsl.reports.explain.html.elements import (
    Html,
    joined,
    tag,
)
from meshdsl.reports.explain.limits import called

_COLOURS = 8
_PHASES = 3  # shades
_NARROW = 0.001  # of the width: joined with its neighbours
_LABELLED = 0.07
_IN_LEGEND = 0.001  # of the time: what takes less is drawn, but not in the legend
_PARTED = 0.006  # wide enough for a gap behind it


def colour(what: str, mesh: Mesh) -> str:
    """Returns the CSS background for what takes time: `compute`, `memory`, `over model`."""
    if not what.startswith("over "):
        return f"var(--{what})"
    axes = what.removeprefix("over ").split("+")
    shades = [axis_colour(axis, mesh) for axis in axes]
    if len(shades) == 1:
        return shades[0]
    stops = ", ".join(f"{shade} {5 * n}px {5 * n + 5}px" for n, shade in enumerate(shades))
    return f"repeating-linear-gradient(135deg, {stops})"


def axis_colour(axis: str, mesh: Mesh) -> str:
    """Returns the CSS colour of a mesh axis."""
    return f"var(--axis-{mesh.names.index(axis) % _COLOURS})"


def legend(times: Mapping[str, float], mesh: Mesh) -> Html:
    """Returns what the colours mean, with the time and share of each."""
    total = sum(times.values())
    bar = [
        tag("span", style=f"flex: {seconds / total:.5f}; background: {colour(what, mesh)}")
        for what, seconds in times.items()
        if total
    ]
    items = [
        tag(
            "li",
            tag("i", style=f"background: {colour(what, mesh)}"),
            f"{called(what)} ",
            tag("b", show_seconds(seconds)),
            tag("span", f" {show_share(seconds / total if total else 0)}", class_="quiet"),
        )
        for what, seconds in times.items()
        if seconds >= _IN_LEGEND * total
    ]
    return joined([tag("div", bar, class_="bar"), tag("ul", items, class_="legend")])


@dataclass(frozen=True)
class _Segment:
    """Intervals drawn as one, from `start` on; usually one."""

    intervals: tuple[Interval, ...]
    start: float
    width: float


@dataclass(frozen=True)
class Scale:
    """What a strip is drawn to: seconds from side to side, bytes from floor to ceiling."""

    seconds: float
    bytes: float


def _segments(intervals: Sequence[Interval], scale: Scale) -> list[_Segment]:
    least = scale.seconds * _NARROW
    even = not scale.seconds  # no interval takes time: all are drawn alike
    segments: list[_Segment] = []
    start = 0.0
    for interval in intervals:
        width = 1 / len(intervals) if even else interval.seconds
        last = segments[-1] if segments else None
        loop = bool(interval.inside) or (last is not None and bool(last.intervals[-1].inside))
        alike = last is not None and last.intervals[-1].phase == interval.phase
        if last and alike and not even and not loop and width < least and last.width < least:
            segments[-1] = _Segment((*last.intervals, interval), last.start, last.width + width)
        else:
            segments.append(_Segment((interval,), start, width))
        start += width
    return segments


def strip(
    intervals: Sequence[Interval], mesh: Mesh, scale: Scale, label: str, first_loop: int | None = 0
) -> Html:
    """Returns intervals as segments, with the phases above and a scale of time below.

    Args:
        label: what the strip shows, for those who do not see it.
        first_loop: None, if its loops cannot be unfolded.
    """
    seconds = scale.seconds or 1.0
    segments = _segments(intervals, scale)
    loops = itertools.count()
    drawn = [
        _drawn(
            segment,
            mesh,
            seconds,
            next(loops) if first_loop is not None and segment.intervals[0].inside else None,
        )
        for segment in segments
    ]
    return tag(
        "div",
        _phases(segments, seconds),
        tag("div", drawn, class_="strip", role="group", aria_label=label, tabindex="0"),
        class_="timeline",
    )


def _span(start: float, width: float, seconds: float) -> str:
    return f"left: {100 * start / seconds:.4f}%; width: {100 * width / seconds:.4f}%"


def _drawn(segment: _Segment, mesh: Mesh, seconds: float, loop: int | None) -> Html:
    first, share = segment.intervals[0], segment.width / seconds
    kinds = ["segment"]
    background = colour(first.limit, mesh)
    name = ""
    if first.inside:
        kinds.append("loop")
        background = _bands(first, mesh)
        name = loop_name(first)
    elif share > _LABELLED:
        name = first.name if first.kind == "local" else first.kind
    if first.axes:
        kinds.append("sent")
    if share > _PARTED:
        kinds.append("parted")
    tip = tooltip(first) if len(segment.intervals) == 1 else _joint_tooltip(segment)
    return tag(
        "span",
        tag("span", name) if name and share > _LABELLED else None,
        class_=" ".join(kinds),
        style=f"{_span(segment.start, segment.width, seconds)}; background: {background}",
        title=tip,
        data_loop=loop,
    )


def _bands(loop: Interval, mesh: Mesh) -> str:
    """Returns bands as high as the shares of what takes a loop's time."""
    total, done, stops = loop.seconds or 1.0, 0.0, []
    for what, seconds in sorted(loop.times.items(), key=lambda item: -item[1]):
        # A gradient cannot hold another one: several axes show the colour of the first.
        shade = colour("+".join(what.split("+")[:1]), mesh)
        share = 100 * seconds / total
        stops.append(f"{shade} {done:.2f}% {done + share:.2f}%")
        done += share
    return f"linear-gradient({', '.join(stops)})" if stops else "var(--memory)"


def loop_name(loop: Interval) -> str:
    """Returns what a loop is called: its dim, and how often it runs."""
    times = f" ×{loop.count:,}" if loop.count > 1 else ""
    return f"{loop.name or loop.kind}{times}"


def tooltip(interval: Interval) -> str:
    """Returns one line about an interval."""
    if interval.inside:
        head = f"{interval.kind} {loop_name(interval)}"
    elif interval.axes:
        head = f"{interval.kind} of {few(interval.name)} over {'+'.join(interval.axes)}"
    else:
        head = interval.name
    facts = [show_seconds(interval.seconds)]
    if interval.wire_bytes:
        facts.append(f"{show_bytes(interval.wire_bytes)} sent")
    if interval.flops:
        facts.append(show_flops(interval.flops))
    if interval.bytes and not interval.inside:
        facts.append(f"{show_bytes(interval.bytes)} to and from memory")
    if not interval.axes:
        facts.append(f"limited by {called(interval.limit)}")
    if interval.memory_bytes is not None:
        facts.append(f"{show_bytes(interval.memory_bytes)} held")
    facts.append(str(interval.source) if interval.source.line else interval.phase)
    return f"{head}: {' · '.join(facts)}"


def _joint_tooltip(segment: _Segment) -> str:
    names = list(dict.fromkeys(i.name for i in segment.intervals if i.name))
    seconds = sum(i.seconds for i in segment.intervals)
    return f"{len(segment.intervals)} short intervals ({few(', '.join(names))}): " + show_seconds(
        seconds
    )


def few(names: str) -> str:
    """Returns the first of many names."""
    listed = names.split(", ")
    return names if len(listed) < 4 else f"{', '.join(listed[:3])} + {len(listed) - 3} more"


def _phases(segments: Sequence[_Segment], seconds: float) -> Html | None:
    """Returns the phases of the step as a band, and what each takes, if there are several."""
    runs: list[tuple[str, float, float]] = []  # phase, start and width
    totals: dict[str, float] = {}
    for phase, run in itertools.groupby(segments, lambda s: s.intervals[0].phase):
        parts = list(run)
        width = sum(part.width for part in parts)
        runs.append((phase, parts[0].start, width))
        totals[phase] = totals.get(phase, 0.0) + width
    if len(totals) < 2:
        return None
    timed = any(interval.seconds for s in segments for interval in s.intervals)
    shades = {phase: f"background: var(--phase-{n % _PHASES})" for n, phase in enumerate(totals)}
    band = [
        tag("i", style=f"{_span(start, width, seconds)}; {shades[phase]}", title=phase)
        for phase, start, width in runs
    ]
    items = [
        tag(
            "li",
            tag("i", style=shades[phase]),
            f"{phase} ",
            tag("span", show_share(width / seconds if timed else 0), class_="quiet"),
        )
        for phase, width in totals.items()
    ]
    return joined([tag("ul", items, class_="legend"), tag("div", band, class_="phases")])
