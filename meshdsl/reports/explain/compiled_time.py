"""The time of a compiled step as text: by the compiler's schedule, beside the plan's."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence

from meshdsl.lowering.compiled import Compiled
from meshdsl.lowering.costs.schedule import Schedule, Times
from meshdsl.lowering.costs.timeline import LOCAL, Timeline
from meshdsl.lowering.costs.units import show_bytes, show_seconds, show_share
from meshdsl.reports.explain.lines import table, wrapped

_WIDTH = 120
_MOST_LINES = 8
_MOST_KERNELS = 3


def time_of_step(
    plan: Timeline,
    simulated: Schedule,
    compiled: Compiled | None,
    others: Mapping[str, Compiled],
    stages: Sequence[str] = (),
) -> list[str]:
    """Returns the sections' lines; none without a compiler.

    Args:
        plan: the step by the peaks of the hardware.
        simulated: the step by the costs of operations.
        compiled: the program's.
        others: other programs for the same machine, by what to call them.
        stages: the axes of the program's pipeline, if it is one.
    """
    schedule = compiled.schedule if compiled is not None else None
    if compiled is None:
        return []
    lines = ["time of a step on one device, by the compiler's cycles and schedule"]
    if schedule is None:
        return lines + wrapped("  not known; ", compiled.untimed, _WIDTH)
    lines += _totals(plan, simulated, schedule, others)
    lines += _sends(schedule, stages)
    lines += _unknown(schedule)
    lines += _by("over", _axes(schedule), sends=True)
    lines += _by("line", _sources(schedule), sends=False)
    return lines


def _totals(
    plan: Timeline, simulated: Schedule, schedule: Schedule, others: Mapping[str, Compiled]
) -> list[str]:
    known = {name: one.schedule for name, one in others.items() if one.schedule is not None}
    columns: list[tuple[str, ...]] = [
        ("", "work", "+ exposed", "= step", "hidden", "sent", "asynchronous", "beside products")
    ]
    local = sum(plan.times.get(limit, 0.0) for limit in LOCAL)
    columns.append(
        (
            "plan, at the peaks",
            show_seconds(local),
            show_seconds(plan.seconds - local),
            show_seconds(plan.seconds),
            "",
            "",
            "",
            "",
        )
    )
    for name, one in (("simulated", simulated), ("compiler", schedule), *known.items()):
        columns.append(
            (
                name,
                show_seconds(one.times.work),
                show_seconds(one.times.exposed),
                show_seconds(one.seconds),
                show_seconds(one.times.hidden),
                show_bytes(one.times.wire_bytes),
                _share(one.asynchronous_bytes, one.times.wire_bytes),
                _share(one.bytes_beside_products, one.times.wire_bytes),
            )
        )
    rows = table(columns, right=range(1, len(columns[0])))
    for name, one in known.items():
        if one.seconds:
            rows.append(
                f"  this program takes {schedule.seconds / one.seconds:.2f} × {name}'s time"
            )
    for name in others.keys() - known.keys():
        rows += wrapped(f"  {name}: not known; ", others[name].untimed, _WIDTH)
    return rows


def _sends(schedule: Schedule, stages: Sequence[str]) -> list[str]:
    """Returns how many of the sends of a pipeline may travel beside products."""
    sends = schedule.sends_of_loops(stages) if stages else []
    if not sends:
        return []
    spanning = sum(times for event, times in sends if event.asynchronous and event.spans_product)
    exposed = sum(event.exposed * times for event, times in sends)
    text = (
        f"of {sum(times for _, times in sends)} sends between stages, {spanning} have products of "
        f"matrices between their start and their end; the device waits {show_seconds(exposed)} for "
        "them all"
    )
    return wrapped("  ", text, _WIDTH)


def _unknown(schedule: Schedule) -> list[str]:
    lines = []
    if not schedule.timed:
        lines += wrapped(
            "  ",
            "this compiler gives no cycles: the time of work is not known, and not in it",
            _WIDTH,
        )
    if schedule.unknown:
        names = [f"{name} × {count}" for name, count in schedule.unknown.items()]
        more = f" and {len(names) - _MOST_KERNELS} more" if len(names) > _MOST_KERNELS else ""
        text = f"work without cycles, not in it: {', '.join(names[:_MOST_KERNELS])}{more}"
        lines += wrapped("  ", text, _WIDTH)
    return lines


def _axes(schedule: Schedule) -> Iterable[tuple[str, Times]]:
    for axes, times in schedule.by(lambda event: event.axes):
        if axes:
            yield "+".join(axes), times


def _sources(schedule: Schedule) -> Iterable[tuple[str, Times]]:
    for source, times in schedule.by(lambda event: event.source):
        yield source or "(no line)", times


def _by(title: str, entries: Iterable[tuple[str, Times]], sends: bool) -> list[str]:
    """Returns a table of what takes time, most first."""
    rows: list[Sequence[str]] = []
    for name, times in itertools.islice(entries, _MOST_LINES):
        work = [] if sends else [show_seconds(times.work)]
        rows.append(
            (
                name,
                *work,
                show_seconds(times.exposed),
                show_seconds(times.hidden),
                show_bytes(times.wire_bytes),
            )
        )
    if not rows:
        return []
    head = (title, *([] if sends else ["work"]), "exposed", "hidden", "sent")
    return ["", *table([head, *rows], right=range(1, len(head)))]


def _share(part: float, of: float) -> str:
    return show_share(part / of) if of else ""
