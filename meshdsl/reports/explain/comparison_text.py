"""The text of a comparison: two layouts side by side, and only what changes."""

from __future__ import annotations

from meshdsl.lowering.costs.units import show_bytes
from meshdsl.reports.explain.comparison import Comparison, Moved, Total
from meshdsl.reports.explain.explanation import Traffic
from meshdsl.reports.explain.limits import too_large, what_limits
from meshdsl.reports.explain.lines import table, wrapped
from meshdsl.reports.explain.text import MEANING

_WIDTH = 120
_LITTLE = 0.01  # of what is sent: collectives that change less share one line
_MARKS = {"added": "+", "removed": "-", "changed": "~"}


def show(comparison: Comparison) -> str:
    """Returns the comparison."""
    sections = [_head(comparison), _totals(comparison), _traffic(comparison)]
    sections.append(_parameters(comparison))
    return "\n\n".join("\n".join(section) for section in sections if section)


def _head(comparison: Comparison) -> list[str]:
    mesh = comparison.mesh
    hardware = comparison.before.timeline.hardware.title
    lines = [f"{comparison.name} on {mesh}: {mesh.size:,} devices of {hardware}, two layouts"]
    for letter, report in (("A", comparison.before), ("B", comparison.after)):
        lines += wrapped(f"  {letter}  ", str(report.layout) or "none", _WIDTH)
        limit = f"most time is spent on {what_limits(report.timeline)}"
        lines += wrapped("     ", "; ".join(filter(None, [limit, too_large(report)])), _WIDTH)
    return lines


def _totals(comparison: Comparison) -> list[str]:
    rows: list[tuple[str, ...]] = [("", "A", "B", "change")]
    rows += [_total(one, one.name) for one in comparison.totals]
    rows += [_total(one, f"  {MEANING[one.name][0]}") for one in comparison.parts if _counts(one)]
    return ["per device and step", *table(rows, right=(1, 2, 3), width=_WIDTH)]


def _counts(one: Total) -> bool:
    return bool(one.before or one.after)


def _total(one: Total, name: str) -> tuple[str, ...]:
    return name, one.show(one.before), one.show(one.after), one.change


def _traffic(comparison: Comparison) -> list[str]:
    if not comparison.traffic:
        return ["on the wire: the same collectives"]
    head = f"on the wire: {len(comparison.traffic)} collectives change"
    head += f", {comparison.same} do not" if comparison.same else ""
    head += " (- only in A, + only in B, ~ in both)"
    rows: list[tuple[str, ...]] = [
        ("", "collective", "of", "over", "count", "wire A", "wire B", "line")
    ]
    least = _LITTLE * max(comparison.before.wire_bytes, comparison.after.wire_bytes)
    shown = [one for one in comparison.traffic if abs(one.more_bytes) >= least]
    rows += [_row(one) for one in shown]
    lines = table(rows, right=(4, 5, 6), squeezed=2, width=_WIDTH)
    if rest := comparison.traffic[len(shown) :]:
        before = show_bytes(sum(one.before.wire_bytes for one in rest if one.before))
        after = show_bytes(sum(one.after.wire_bytes for one in rest if one.after))
        lines.append(f"  and {len(rest)} by less than 1 % of it all: {before} in A, {after} in B")
    return [head, *lines]


def _row(one: Moved) -> tuple[str, ...]:
    shown = one.any
    dims = f" [{','.join(shown.dims.names)}]" if shown.dims else ""
    return (
        _MARKS[one.what],
        shown.kind,
        f"{shown.what[0]}{dims}",
        "+".join(shown.axes),
        _counts_of(one),
        *(_wire(t) for t in (one.before, one.after)),
        str(shown.source),
    )


def _counts_of(one: Moved) -> str:
    counts = list(dict.fromkeys(t.count for t in (one.before, one.after) if t))
    return " → ".join(f"{count:,}" for count in counts)


def _wire(traffic: Traffic | None) -> str:
    return show_bytes(traffic.wire_bytes) if traffic else "–"


def _parameters(comparison: Comparison) -> list[str]:
    if not comparison.parameters:
        return []
    rows = [("", "A", "bytes", "B", "bytes")]
    rows += [
        (path, str(a.layout), show_bytes(a.bytes), str(b.layout), show_bytes(b.bytes))
        for path, a, b in comparison.parameters
    ]
    return ["parameters that lie elsewhere", *table(rows, right=(2, 4), width=_WIDTH)]
