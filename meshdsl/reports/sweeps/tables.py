"""Tables: a ranked sweep as CSV and JSON, and as a table on a terminal.

In CSV and JSON, bytes are bytes and times are seconds, of one device and one step. What is sent has
a column for each set of mesh axes.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.table import Table
from rich.text import Text

from meshdsl.lowering.costs.units import show_bytes, show_seconds
from meshdsl.reports.sweeps.ranking import Ranked
from meshdsl.reports.sweeps.result import Result

_MOST_ROWS = 30
_LONGEST = 300
_HEAD = re.compile(r"layout does not fit this program \(\d+ problems?\)")  # mesh and layout follow


def as_csv(rows: Sequence[Ranked]) -> str:
    """Returns one line for every candidate, after a line of heads."""
    axes = axes_of(rows)
    flat = [_flat(row, axes) for row in rows]
    text = io.StringIO()
    writer = csv.DictWriter(text, list(flat[0]) if flat else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat)
    return text.getvalue()


def as_json(rows: Sequence[Ranked], facts: Mapping[str, Any]) -> str:
    """Returns the facts of a sweep, and its `candidates` in their order."""
    candidates = [{"rank": r.rank, "front": r.front, **asdict(r.result)} for r in rows]
    return json.dumps({**facts, "candidates": candidates}, ensure_ascii=False, indent=1) + "\n"


def axes_of(rows: Sequence[Ranked]) -> list[str]:
    """Returns the sets of mesh axes over which something is sent, as `data+model`."""
    sets = dict.fromkeys(axes for row in rows for axes in row.result.wire_bytes)
    return sorted(sets, key=lambda axes: (axes.count("+"), axes))


def _flat(row: Ranked, axes: Sequence[str]) -> dict[str, Any]:
    columns = {"rank": row.rank, "front": row.front, **asdict(row.result)}
    sent, (low, high) = columns.pop("wire_bytes"), columns.pop("quartiles") or (None, None)
    at = list(columns).index("peak_bytes")
    failed = bool(row.result.reason)
    more = {"lower_quartile": low, "upper_quartile": high}
    more |= {"wire_bytes": None if failed else row.result.wire}
    more |= {f"wire_bytes over {one}": None if failed else sent.get(one, 0.0) for one in axes}
    pairs = [*list(columns.items())[:at], *more.items(), *list(columns.items())[at:]]
    return {**dict(pairs), "notes": "\n".join(columns["notes"])}


def shown(rows: Sequence[Ranked], measured: bool) -> Table:
    """Returns the first of the candidates with figures, for a terminal.

    Args:
        measured: whether times are.
    """
    with_figures = [row for row in rows if not row.result.reason]
    axes, meshes = axes_of(rows), {row.result.mesh for row in with_figures}
    machines = {row.result.topology for row in with_figures}
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    table.add_column("#", justify="right")
    if len(machines) > 1:
        table.add_column("topology", no_wrap=True)
    if len(meshes) > 1:
        table.add_column("mesh", overflow="fold", min_width=12)
    table.add_column("layout", overflow="fold", min_width=24, ratio=1)
    counts = {row.result.devices for row in with_figures}
    heads = [*(["devices × step"] if len(counts) > 1 else []), "step"]
    heads += [*(["quartiles", "estimate"] if measured else []), *axes, "peak"]
    for head in heads:
        table.add_column(head, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for row in with_figures[:_MOST_ROWS]:
        one = row.result
        cells = [str(row.rank), *([one.topology] if len(machines) > 1 else [])]
        cells += [*([one.mesh] if len(meshes) > 1 else []), one.layout or "-"]
        cells += [show_seconds(one.device_seconds)] if len(counts) > 1 else []
        cells += [show_seconds(one.seconds or 0.0)]
        if measured:
            low, high = one.quartiles or (0.0, 0.0)
            cells.append(f"{show_seconds(low)} to {show_seconds(high)}")
            cells.append(show_seconds(one.estimated_seconds or 0.0))
        cells += [show_bytes(one.wire_bytes[a]) if a in one.wire_bytes else "-" for a in axes]
        cells += [show_bytes(one.peak_bytes or 0), _marks(row)]
        table.add_row(*(Text(cell) for cell in cells), style=None if one.fits else "dim")
    return table


def _marks(row: Ranked) -> str:
    fits = "" if row.result.fits else "does not fit"
    return ", ".join(filter(None, ["front" if row.front else "", fits]))


def left_out(rows: Sequence[Ranked]) -> int:
    """Returns how many candidates with figures `shown` does not show."""
    return max(0, sum(not row.result.reason for row in rows) - _MOST_ROWS)


def why(result: Result) -> str:
    """Returns the reason why there are no figures as one short line."""
    lines = [" ".join(line.split()) for line in result.reason.splitlines() if line.strip()]
    if len(lines) > 1 and _HEAD.fullmatch(lines[0]):
        lines = [line for line in lines[1:] if not line.startswith(("mesh ", "layout "))]
    text = " ".join(lines)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"
