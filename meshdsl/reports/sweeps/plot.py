"""Plot: memory against communication, one mark for each candidate, as SVG.

Both scales are logarithmic, to the base of two; what sends nothing stands at the left end. The
Pareto front is drawn as stairs: no candidate lies below them. Its candidates have their ranks.
Colours are written into the elements, so that the picture is the same in a page and as a file.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from meshdsl.lowering.costs.units import show_bytes, show_seconds
from meshdsl.reports.explain.html.elements import Html, tag
from meshdsl.reports.sweeps.ranking import Ranked
from meshdsl.reports.sweeps.result import Result

_WIDTH, _HEIGHT = 1000, 520
_LEFT, _RIGHT, _TOP, _BOTTOM = 84, 36, 32, 72
_GOOD, _BAD, _FRONT, _RULE = "#2f6fd0", "#c9483f", "#e07b1a", "#8a94a3"
_MOST_TICKS = 9
_GAP = 140  # left of all others: those that send nothing, and room for the label below
_FAR = 4  # times the largest peak: a room beyond it is named above the picture
_LINE = 28  # of text on a narrow screen, where it is larger
_NEAR = 14  # marks that are no further apart share one label


@dataclass(frozen=True)
class _Scale:
    """Bytes on a line of the picture, from `start` to `end`."""

    low: int
    high: int
    start: float
    end: float

    @staticmethod
    def of(counts: Sequence[float], start: float, end: float) -> _Scale:
        logs = [math.log2(count) for count in counts if count >= 1] or [0.0]
        low, high = math.floor(min(logs)), math.ceil(max(logs))
        return _Scale(low, max(high, low + 1), start, end)

    def at(self, count: float) -> float:
        part = (math.log2(count) - self.low) / (self.high - self.low) if count >= 1 else 0.0
        return round(self.start + part * (self.end - self.start), 2)

    def ticks(self) -> list[tuple[float, str, str | None]]:
        """Returns places, their texts and, for every second one, the class of those between.

        A narrow screen has no room for these.
        """
        every = math.ceil((self.high - self.low) / _MOST_TICKS)
        powers = range(self.low, self.high + 1, every)
        return [
            (self.at(2.0**n), show_bytes(2**n), "between" if number % 2 else None)
            for number, n in enumerate(powers)
        ]


def plot(rows: Sequence[Ranked], rooms: Mapping[str, int]) -> Html:
    """Returns the picture of those candidates that have figures.

    Args:
        rooms: bytes that a device may hold, by topology, or under "" of all; lines, or a text above
            where they are far above all marks.
    """
    measured = [row for row in rows if not row.result.reason]
    if not measured:
        return Html("")
    sent = [row.result.wire for row in measured]
    gap = _GAP if min(sent) < 1 else 0
    across = _Scale.of(sent, _LEFT + gap, _WIDTH - _RIGHT)
    peaks = [float(row.result.peak_bytes or 0) for row in measured]
    near = [room for room in rooms.values() if room <= _FAR * max(peaks)]
    up = _Scale.of([*peaks, *near], _HEIGHT - _BOTTOM, _TOP)

    def place(one: Result) -> tuple[float, float]:
        x = across.at(one.wire) if one.wire >= 1 else float(_LEFT + gap / 2)
        return x, up.at(one.peak_bytes or 0)

    behind = [row for row in measured if not row.front]
    ahead = [row for row in measured if row.front]
    return tag(
        "svg",
        _grid(across, up, bool(gap)),
        _rooms(rooms, up),
        _stairs([place(row.result) for row in ahead]),
        [_mark(row, *place(row.result)) for row in behind + ahead],
        _labels([(row.rank, *place(row.result)) for row in ahead]),
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {_WIDTH} {_HEIGHT}",
        font_family="system-ui, sans-serif",
        font_size="13",
        class_="plot",
        role="img",
        aria_label="memory against what is sent, a mark for each candidate",
    )


def _grid(across: _Scale, up: _Scale, zero: bool) -> list[Html]:
    floor, marks = _HEIGHT - _BOTTOM, []
    ticks = across.ticks() + ([(_LEFT + _GAP / 2, "0", None)] if zero else [])
    for x, text, between in ticks:
        marks.append(_line(x, x, _TOP, floor, opacity="0.25"))
        marks.append(_text(text, x, floor + 34, "middle", between))
    for y, text, between in up.ticks():
        marks.append(_line(_LEFT, _WIDTH - _RIGHT, y, y, opacity="0.25"))
        marks.append(_text(text, _LEFT - 8, y + 4, "end", between))
    marks.append(
        _text("sent by a device per step", (_LEFT + _WIDTH - _RIGHT) / 2, _HEIGHT - 8, "middle")
    )
    marks.append(_text("held at the peak", _LEFT, _TOP - 12, "start"))
    return marks


def by_room(rooms: Mapping[str, int]) -> dict[int, str]:
    """Returns the names of the topologies that have as much.

    >>> by_room({"v5p:4x4x4": 95, "h100:8x8": 80, "v5p:8x8x8": 95})
    {95: 'v5p:4x4x4, v5p:8x8x8', 80: 'h100:8x8'}
    """
    names: dict[int, str] = {}
    for name, room in rooms.items():
        names[room] = f"{names[room]}, {name}" if room in names else name
    return names


def _rooms(rooms: Mapping[str, int], up: _Scale) -> list[Html]:
    marks, far = [], []
    for room, names in by_room(rooms).items():
        text = f"{show_bytes(room)}: all {f'on {names}' if names else 'there is'}"
        y = up.at(room)
        if y < _TOP:
            far.append(text)
            continue
        # Below its line where the space above the picture is for those that are far above.
        below = y < _TOP + _LINE
        marks.append(_line(_LEFT, _WIDTH - _RIGHT, y, y, stroke=_BAD, stroke_dasharray="6 4"))
        marks.append(_text(text, _WIDTH - _RIGHT, y + (_LINE - 4 if below else -5), "end"))
    if far:
        marks.append(_text(f"far above: {'; '.join(far)}", _WIDTH - _RIGHT, _TOP - 12, "end"))
    return marks


def _stairs(points: Sequence[tuple[float, float]]) -> Html:
    ordered = sorted(set(points))
    path = "".join(
        f"M{x:g} {y:g}" if number == 0 else f"H{x:g}V{y:g}" for number, (x, y) in enumerate(ordered)
    )
    return tag("path", d=path, fill="none", stroke=_FRONT, stroke_width="2")


def _mark(row: Ranked, x: float, y: float) -> Html:
    one = row.result
    colour = _GOOD if one.fits else _BAD
    title = (
        f"{row.rank}. {one.candidate}\n{show_seconds(one.seconds or 0.0)} per step, "
        f"{show_bytes(one.wire)} sent, {show_bytes(one.peak_bytes or 0)} held"
    )
    mark = tag(
        "circle",
        tag("title", title),
        cx=x,
        cy=y,
        r=6 if row.front else 4,
        fill=colour if one.fits else "none",
        fill_opacity="0.8",
        stroke=_FRONT if row.front else colour,
        stroke_width="2",
        pointer_events="all",
    )
    return tag("a", mark, href=one.page) if one.page else mark


def _labels(marks: Sequence[tuple[int, float, float]]) -> list[Html]:
    """Returns ranks beside their marks; those of marks close together in one text."""
    groups: list[tuple[float, float, list[int]]] = []
    for rank, x, y in sorted(marks):
        for left, top, ranks in groups:
            if abs(x - left) < _NEAR and abs(y - top) < _NEAR:
                ranks.append(rank)
                break
        else:
            groups.append((x, y, [rank]))
    return [_text(", ".join(map(str, ranks)), x + 9, y - 7, "start") for x, y, ranks in groups]


def _line(x1: float, x2: float, y1: float, y2: float, **more: str) -> Html:
    return tag("line", x1=x1, x2=x2, y1=y1, y2=y2, **{"stroke": _RULE, **more})


def _text(text: str, x: float, y: float, anchor: str, kind: str | None = None) -> Html:
    return tag("text", text, x=x, y=y, text_anchor=anchor, fill="currentColor", class_=kind)
