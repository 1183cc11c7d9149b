"""Comparing: two layouts side by side as HTML: figures, strips on one scale, and what changes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from meshdsl.lowering.costs.units import show_bytes
from meshdsl.reports.explain.comparison import Comparison, Moved, Total
from meshdsl.reports.explain.explanation import Explanation
from meshdsl.reports.explain.html import sections
from meshdsl.reports.explain.html.curves import memory_curve, ruler
from meshdsl.reports.explain.html.elements import (
    Cell,
    Child,
    Column,
    Html,
    code,
    facts,
    joined,
    place,
    table,
    tag,
    value_names,
)
from meshdsl.reports.explain.html.placement import axis_bar, mesh_drawing, type_of
from meshdsl.reports.explain.html.strips import Scale, legend, strip
from meshdsl.reports.explain.limits import too_large, what_limits
from meshdsl.reports.explain.text import MEANING

_LETTERS = ("A", "B")


def everything(comparison: Comparison) -> Iterator[Html | None]:
    """Yields the header and all sections."""
    yield _header(comparison)
    yield _totals(comparison)
    yield _steps(comparison)
    yield _traffic(comparison)
    yield _parameters(comparison)
    for letter, report in zip(_LETTERS, (comparison.before, comparison.after), strict=True):
        yield tag(
            "details",
            tag("summary", _letter(letter), tag("b", " The whole report of this layout")),
            joined([sections.header(report), *sections.everything(report)]),
            class_="fold plain",
            style="margin-top: 24px",
        )


def _letter(letter: str) -> Html:
    return tag("span", letter, class_=f"name-{letter.lower()}")


def _header(comparison: Comparison) -> Html:
    mesh = comparison.mesh
    known: list[tuple[str, Child]] = [
        (
            "mesh",
            joined([mesh_drawing(mesh), tag("span", f" {mesh.size:,} devices", class_="quiet")]),
        ),
        ("hardware", comparison.before.timeline.hardware.title),
    ]
    layouts = []
    for letter, report in zip(_LETTERS, (comparison.before, comparison.after), strict=True):
        limit = f"most time is spent on {what_limits(report.timeline)}"
        layouts += [
            _letter(letter),
            tag(
                "div",
                code(str(report.layout) or "none"),
                tag("div", limit, class_="quiet"),
                tag("div", too_large(report), class_="warn") if too_large(report) else None,
            ),
        ]
    return tag(
        "header",
        tag("h1", f"{comparison.name}: two layouts"),
        facts(known),
        tag("div", layouts, class_="pair"),
    )


def _columns(*heads: str) -> list[Column]:
    """Returns columns; those whose head begins with `#` hold numbers."""
    return [Column(head.removeprefix("#"), number=head.startswith("#")) for head in heads]


def _totals(comparison: Comparison) -> Html:
    rows = [_total(one, one.name) for one in comparison.totals]
    rows += [
        _total(one, f"{MEANING[one.name][0]} at the peak")
        for one in comparison.parts
        if one.before or one.after
    ]
    return sections.section(
        "Per device and step",
        table("totals", _columns("figure", "#A", "#B", "#change"), rows, filtered=False),
    )


def _total(one: Total, name: str) -> Sequence[Cell | str]:
    more = one.after - one.before
    relative = more / one.before if one.before else float(more > 0)
    kind = "quiet" if not more else "warn" if more > 0 else "good"
    return (
        name,
        Cell(one.show(one.before), one.before),
        Cell(one.show(one.after), one.after),
        Cell(tag("span", one.change, class_=kind), relative),
    )


def _steps(comparison: Comparison) -> Html:
    both = (comparison.before, comparison.after)
    scale = Scale(
        max(report.timeline.seconds for report in both),
        max(report.memory.peak_bytes for report in both),
    )
    return sections.section(
        "Both steps on one scale",
        [_step(letter, report, scale) for letter, report in zip(_LETTERS, both, strict=True)],
        lead="Time from left to right, and memory below it, to the same scale in both.",
    )


def _step(letter: str, report: Explanation, scale: Scale) -> Html:
    timeline = report.timeline
    label = f"the step under layout {letter}"
    return tag(
        "div",
        tag("h3", _letter(letter), " ", code(str(report.layout) or "none")),
        legend(timeline.times, report.mesh),
        strip(timeline.intervals, report.mesh, scale, label, first_loop=None),
        memory_curve(timeline.intervals, scale, timeline.hardware.memory_bytes),
        ruler(scale),
        tag("p", class_="told", aria_live="polite"),
    )


def _traffic(comparison: Comparison) -> Html:
    if not comparison.traffic:
        return sections.section("On the wire", tag("p", "The same collectives under both."))
    heads = ("change", "phase", "collective", "of", "over", "#count A", "#count B")
    columns = _columns(*heads, "#wire A", "#wire B", "#more", "line")
    same = f" {comparison.same} others are the same." if comparison.same else ""
    return sections.section(
        "What changes on the wire",
        table("changed collectives", columns, [_moved(one) for one in comparison.traffic]),
        lead=f"Per device and step, by source line.{same}",
    )


def _moved(one: Moved) -> Sequence[Cell | Html | str]:
    shown, more = one.any, one.more_bytes
    counts = [
        Cell(f"{t.count:,}" if t else "–", t.count if t else 0) for t in (one.before, one.after)
    ]
    wires = [
        Cell(show_bytes(t.wire_bytes) if t else "–", t.wire_bytes if t else 0)
        for t in (one.before, one.after)
    ]
    sign = "+" if more > 0 else "−"
    difference = f"{sign}{show_bytes(abs(more))}" if more else "same"
    kind = "warn" if more > 0 else "good" if more else "quiet"
    return (
        one.what,
        shown.phase,
        shown.kind,
        joined(
            [
                value_names(shown.what[0]),
                " ",
                tag("code", f"[{', '.join(shown.dims.names)}]", class_="quiet"),
            ]
        ),
        "+".join(shown.axes),
        *counts,
        *wires,
        Cell(tag("span", difference, class_=kind), more),
        place(shown.source, phase=False),
    )


def _parameters(comparison: Comparison) -> Html | None:
    if not comparison.parameters:
        return None
    mesh, other = comparison.before.mesh, comparison.after.mesh
    columns = [Column("parameter"), *_columns("A", "#per device"), *map(Column, mesh.names)]
    columns += [*_columns("B", "#per device"), *map(Column, other.names)]
    rows: list[list[Cell | Child]] = [
        [
            code(path),
            code(type_of(a, mesh)),
            Cell(show_bytes(a.bytes), a.bytes),
            *(axis_bar(a, axis, mesh) for axis in mesh.names),
            code(type_of(b, other)),
            Cell(show_bytes(b.bytes), b.bytes),
            *(axis_bar(b, axis, other) for axis in other.names),
        ]
        for path, a, b in comparison.parameters
    ]
    return sections.section(
        "Parameters that lie elsewhere",
        table("moved parameters", columns, rows),
        lead="On the left under layout A, on the right under layout B.",
    )
