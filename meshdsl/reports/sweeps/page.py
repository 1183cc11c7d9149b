"""Page: a sweep as one HTML page: the plot, the ranked table, and what could not be measured.

Each candidate is linked to its own report. Nothing is fetched from a network.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from meshdsl.lowering.costs.units import show_bytes, show_seconds
from meshdsl.reports.explain.html.elements import (
    Cell,
    Child,
    Column,
    Html,
    byte_cell,
    code,
    facts,
    table,
    tag,
)
from meshdsl.reports.explain.html.page import document
from meshdsl.reports.explain.html.sections import section
from meshdsl.reports.sweeps.plot import by_room, plot
from meshdsl.reports.sweeps.ranking import Ranked
from meshdsl.reports.sweeps.tables import axes_of


@dataclass(frozen=True)
class Heading:
    """What a sweep is about, in words.

    Attributes:
        times: where the times come from.
        peaks: where the bytes at the peak come from.
        rooms: bytes that a device may hold, by topology, or under "" of all.
        nearest: where none fits, which one comes nearest and what would make it fit.
    """

    title: str
    hardware: str
    times: str
    peaks: str
    rooms: Mapping[str, int]
    nearest: str = ""


def page(rows: Sequence[Ranked], heading: Heading) -> str:
    """Returns the whole page."""
    measured = [row for row in rows if not row.result.reason]
    failed = [row for row in rows if row.result.reason]
    header = tag(
        "header",
        tag("h1", heading.title),
        facts(
            [
                ("candidates", f"{len(rows):,}"),
                ("fit", f"{sum(bool(row.result.fits) for row in rows):,}"),
                ("hardware", heading.hardware),
                ("memory of a device", _memory(heading.rooms)),
                ("step", heading.times),
                ("peak", heading.peaks),
            ]
        ),
        tag("pre", heading.nearest, style="white-space: pre-wrap") if heading.nearest else None,
    )
    return document(heading.title, header, *_measured(measured, heading), _failed(failed))


def _memory(rooms: Mapping[str, int]) -> str:
    names_of_room = by_room(rooms).items()
    return "; ".join(
        f"{show_bytes(room)}{f' on {names}' if names else ''}" for room, names in names_of_room
    )


def _measured(rows: Sequence[Ranked], heading: Heading) -> list[Html]:
    if not rows:
        return []
    picture = section(
        "Memory against communication",
        plot(rows, heading.rooms),
        lead=(
            "Filled: fits. The line is the Pareto front: no other candidate that fits both holds "
            "and sends less than one on it; the numbers are ranks. Rest on a mark to read it; a "
            "click opens its report."
        ),
    )
    return [picture, section("Candidates", _table(rows), lead="Per device and step.")]


def _table(rows: Sequence[Ranked]) -> Html:
    axes = axes_of(rows)
    timed = any(row.result.quartiles for row in rows)
    compiled = any(row.result.compile_seconds is not None for row in rows)
    sizes = len({row.result.devices for row in rows}) > 1
    numbers = [*(["devices × step"] if sizes else []), "step"]
    numbers += [*(["lower quartile", "upper quartile"] if timed else [])]
    numbers += [*(["estimate"] if timed else []), "if sending overlaps", "sent"]
    numbers += [f"over {one}" for one in axes]
    numbers += ["peak", *(["planned peak", "compiled in"] if compiled else [])]
    machines = any(row.result.topology for row in rows)
    columns = [Column("#", number=True), *([Column("topology")] if machines else [])]
    columns += [Column("mesh"), Column("layout")]
    columns += [Column(name, number=True) for name in numbers]
    columns += [Column("fits"), Column("front"), Column("most time is spent on"), Column("notes")]
    return table("candidates", columns, [_row(row, axes, timed, compiled, sizes) for row in rows])


def _row(
    row: Ranked, axes: Sequence[str], timed: bool, compiled: bool, sizes: bool
) -> list[Cell | Child]:
    one = row.result
    layout = tag("div", code(one.layout or "none"), style="min-width: 14ch")
    cells: list[Cell | Child] = [
        Cell(str(row.rank), row.rank),
        *([one.topology] if one.topology else []),
        one.mesh,
        tag("a", layout, href=one.page) if one.page else layout,
        *([_seconds(one.device_seconds)] if sizes else []),
        _seconds(one.seconds),
    ]
    if timed:
        cells += [_seconds(each) for each in one.quartiles or (None, None)]
        cells.append(_seconds(one.estimated_seconds))
    cells += [_seconds(one.overlapped_seconds)]
    cells += [byte_cell(one.wire), *(byte_cell(one.wire_bytes.get(axis, 0.0)) for axis in axes)]
    cells.append(byte_cell(one.peak_bytes or 0))
    if compiled:
        cells += [byte_cell(one.planned_peak_bytes or 0), _seconds(one.compile_seconds)]
    fits = "yes" if one.fits else tag("span", "no", class_="warn")
    return [*cells, fits, "front" if row.front else "", one.limit, "; ".join(one.notes)]


def _seconds(count: float | None) -> Cell:
    return Cell("–", 0.0) if count is None else Cell(show_seconds(count), count)


def _failed(rows: Sequence[Ranked]) -> Html | None:
    if not rows:
        return None
    machines = any(row.result.topology for row in rows)
    columns = [*([Column("topology")] if machines else [])]
    columns += [Column("mesh"), Column("layout"), Column("why")]
    cells: list[list[Cell | Child]] = [
        [
            *([row.result.topology] if machines else []),
            row.result.mesh,
            code(row.result.layout or "none"),
            tag("pre", row.result.reason, style="white-space: pre-wrap; margin: 0"),
        ]
        for row in rows
    ]
    return section("Not measured", table("candidates without figures", columns, cells))
