"""Gantt chart: what each stage of a pipeline does in each tick, to the scale of time."""

from __future__ import annotations

from collections.abc import Sequence

from meshdsl.lowering.pipelines.actions import Action, Kind
from meshdsl.lowering.pipelines.schedule import Row
from meshdsl.reports.explain.html.elements import Html, tag
from meshdsl.reports.explain.pipeline import PipelineReport

_WIDTH = 1000.0
_NARROW = 360.0  # of a line on a narrow screen
_IN_A_LINE = 10  # columns of it
_MOST_REPEATED = 2000  # passes that are drawn twice, for wide and for narrow screens
_MOST_AT_ONCE = 20  # columns that are readable where a wide chart is drawn smaller
_ROW, _BAR = 22, 18  # of a stage, and of what is drawn in it
_LABEL = 50.0
_MOST_COLUMNS = 400
_MOST_STAGES = 64
_READABLE = 17.0  # wide enough for a text
_TEXT = 9
_SHADES = 4  # of the rounds of a stage


def gantt(report: PipelineReport) -> Html:
    """Returns the chart: a row per stage, from left to right the passes of its chunks.

    On a narrow screen it goes on below, as lines of a text do, where it is not too long for that.
    """
    schedule = report.running.schedule
    columns = min(max(map(len, schedule.rows)), _MOST_COLUMNS)
    rows = [row[:columns] for row in schedule.rows[:_MOST_STAGES]]
    widths = [_seconds(report, [row[n] for row in rows]) for n in range(columns)]
    shortened = columns < max(map(len, schedule.rows)) or len(rows) < schedule.stages
    several = columns * len(rows) <= _MOST_REPEATED
    kind = ("long " if columns > _MOST_AT_ONCE else "") + ("wide" if several else "")
    charts = [_chart(report, rows, widths, _WIDTH, kind.strip())]
    if several:
        parts = [slice(first, first + _IN_A_LINE) for first in range(0, columns, _IN_A_LINE)]
        longest = max(sum(widths[part]) for part in parts)
        for part in parts:  # all to one scale
            width = _LABEL + (_NARROW - _LABEL) * sum(widths[part]) / longest
            charts.append(
                _chart(report, [row[part] for row in rows], widths[part], width, "narrow")
            )
    words = (
        "Forward passes are dark, backward passes light; other chunks of a stage are paler. Passes "
        "of layers are to scale, at the peaks of the hardware; gaps are waits."
    )
    more = f" The first {columns} passes of {len(rows)} stages are shown." if shortened else ""
    return tag("div", charts, tag("p", words + more, class_="quiet"), class_="gantt")


def _chart(
    report: PipelineReport, rows: Sequence[Row], widths: Sequence[float], width: float, kind: str
) -> Html:
    """Returns some columns of the schedule, drawn as wide as `width`."""
    scale = (width - _LABEL) / sum(widths)
    starts = [_LABEL + scale * sum(widths[:n]) for n in range(len(widths))]
    drawn = [
        _row(report, stage, row, starts, [scale * each for each in widths])
        for stage, row in enumerate(rows)
    ]
    drawing = _NARROW if kind == "narrow" else _WIDTH
    return tag(
        "svg",
        drawn,
        viewBox=f"0 0 {drawing:g} {_ROW * len(rows)}",
        class_=kind or None,
        role="img",
        aria_label=f"what {len(rows)} stages do in {len(widths)} passes, one after the other",
    )


def _seconds(report: PipelineReport, column: list[Action | None]) -> float:
    """Returns how long a column takes: each has passes of one kind."""
    forward = any(action is not None and action.kind is Kind.FORWARD for action in column)
    return (report.forward_seconds if forward else report.backward_seconds) or 1.0


def _row(
    report: PipelineReport,
    stage: int,
    row: Row,
    starts: Sequence[float],
    widths: Sequence[float],
) -> Html:
    stages, top = report.running.schedule.stages, _ROW * stage
    middle = top + _BAR / 2 + _TEXT / 3
    parts = [tag("text", f"stage {stage}", x="0", y=middle, font_size=_TEXT + 1)]
    for action, x, width in zip(row, starts, widths, strict=True):
        if action is None:
            continue
        kind = "forward" if action.kind is Kind.FORWARD else "backward"
        shade = action.chunk // stages % _SHADES
        bar = tag(
            "rect",
            x=x,
            y=top,
            width=max(0.94 * width, 0.5),
            height=_BAR,
            class_=kind,
            opacity=1 - 0.2 * shade,
        )
        name = f"stage {stage}: {kind} pass of chunk {action.chunk}, "
        label = None
        if width >= _READABLE:
            label = tag(
                "text", str(action), x=x + 0.47 * width, y=middle, font_size=_TEXT, class_="name"
            )
        title = tag("title", f"{name}microbatch {action.microbatch}")
        parts.append(tag("g", title, bar, label))
    return tag("g", parts)
