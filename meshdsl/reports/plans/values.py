"""Plans as values for JSON: what the text has, in seconds and bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from meshdsl.reports.plans.figures import Figures, Heading
from meshdsl.search.plans import Plans


def as_values(
    heading: Heading, plans: Plans, rows: Sequence[Figures], commands: Sequence[str]
) -> dict[str, Any]:
    """Returns a report as values; arguments as of `text.show`."""
    best = next(row for row in rows if row.plan.fits)
    fronts = set(map(id, plans.front))
    front = sorted((row for row in rows if id(row.plan) in fronts), key=lambda row: row.seconds)
    fastest = plans.simplified_from
    return {
        "model": heading.model,
        "machine": heading.machine,
        "batch": heading.batch,
        "dtype": None if best.dtype is None else str(best.dtype),
        f"{heading.unit}_per_step": heading.count,
        "version": heading.version,
        "hardware": plans.hardware.name,
        "memory_bytes": plans.hardware.memory_bytes,
        "points": plans.points,
        "lowered": plans.lowered,
        "complete": plans.complete,
        "bound_seconds": plans.bound,
        "gap": plans.gap,
        "best": {
            **_plan(best, heading),
            "memory": dict(best.memory),
            "limit": best.limit,
            "commands": list(commands),
        },
        "others": [
            {**_plan(row, heading), "worse": row.worse(best)} for row in rows if row is not best
        ],
        "front": [_plan(row, heading) for row in front],
        "simplified_from": fastest
        and {"layout": str(fastest.point.layout), "seconds": fastest.seconds},
    }


def _plan(row: Figures, heading: Heading) -> dict[str, Any]:
    variant = row.plan.point.variant
    return {
        "mesh": str(row.plan.program.mesh),
        "layout": str(row.plan.point.layout),
        "microbatches": variant.microbatches,
        "remat": variant.remat or None,
        "memory_limit": row.plan.memory,
        "seconds": row.seconds,
        "work_seconds": row.work,
        "waits": [
            {"collective": kind, "axes": axes, "seconds": seconds}
            for (kind, axes), seconds in row.waits.items()
        ],
        "peak_bytes": row.plan.peak_bytes,
        f"{heading.unit}_per_second": heading.count / row.seconds,
        "decided": row.plan.decided,
        "fits": row.plan.fits,
    }
