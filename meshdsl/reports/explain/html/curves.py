"""Curves: what a device holds over a strip of intervals, and the scale of time below both."""

from __future__ import annotations

from collections.abc import Sequence

from meshdsl.lowering.costs.timeline import Interval
from meshdsl.lowering.costs.units import show_bytes, show_seconds
from meshdsl.reports.explain.html.elements import Html, tag
from meshdsl.reports.explain.html.strips import Scale


def memory_curve(
    intervals: Sequence[Interval], scale: Scale, room: int, marked: bool = True
) -> Html:
    """Returns the memory in use while the intervals of a strip run, on the same axis of time.

    Args:
        room: bytes that the device has, named beside the peak; a line, where the scale reaches it.
        marked: whether the highest place is marked.
    """
    seconds, steps, known = scale.seconds or 1.0, [], None
    even = not scale.seconds
    start = 0.0
    for interval in intervals:
        width = 1 / len(intervals) if even else interval.seconds
        known = interval.memory_bytes if interval.memory_bytes is not None else known
        if known is not None:
            steps.append((start / seconds, (start + width) / seconds, known))
        start += width
    if not steps:
        return Html("")
    top = scale.bytes * 1.15 or 1.0
    points = [f"M0 {100 - 100 * steps[0][2] / top:.2f}"]
    for _, right, count in steps:
        points.append(f"V{100 - 100 * count / top:.2f}H{1000 * right:.2f}")
    line = "".join(points)
    peak = max(steps, key=lambda step: step[2])
    figure = tag(
        "svg",
        tag("path", d=f"{line}V100H0Z", class_="area"),
        tag("path", d=line, class_="edge"),
        tag("line", x1="0", x2="1000", y1="99.8", y2="99.8", class_="floor"),
        viewBox="0 0 1000 100",
        preserveAspectRatio="none",
        role="img",
        aria_label=f"memory over time, at most {show_bytes(peak[2])}",
    )
    return tag(
        "div",
        figure,
        _level(scale.bytes / 2, top, f"{show_bytes(scale.bytes / 2)}"),
        _level(room, top, f"{show_bytes(room)}: all there is", "room") if room <= top else None,
        _mark(peak, top, room) if marked else None,
        class_="memory",
    )


def _level(count: float, top: float, text: str, kind: str = "") -> Html:
    classes = f"level {kind}".strip()
    return tag("span", tag("span", text), class_=classes, style=f"bottom: {100 * count / top:.2f}%")


def _mark(peak: tuple[float, float, int], top: float, room: int) -> Html:
    left = 100 * (peak[0] + peak[1]) / 2
    side = "mark left" if left > 50 else "mark"
    style = f"left: {left:.3f}%; bottom: {100 * peak[2] / top:.2f}%"
    text = f"peak {show_bytes(peak[2])} of {show_bytes(room)}"
    return tag("span", tag("b", text), class_=side, style=style)


def ruler(scale: Scale) -> Html:
    """Returns the scale of time."""
    if not scale.seconds:
        return Html("")
    step = _round_step(scale.seconds / 6)
    marks = [n * step for n in range(int(scale.seconds / step + 1e-9) + 1)]
    return tag(
        "div",
        [
            tag(
                "span",
                show_seconds(at) if at else "0",
                style=f"left: {100 * at / scale.seconds:.3f}%",
            )
            for at in marks
            if at / scale.seconds < 0.97
        ],
        class_="ruler",
        aria_hidden="true",
    )


def _round_step(least: float) -> float:
    """Returns 1, 2 or 5 times a power of ten, at least `least`."""
    power = 10.0**-12
    while power * 10 <= least:
        power *= 10
    return next(power * n for n in (1, 2, 5, 10) if power * n >= least * (1 - 1e-9))
