"""Printing: a schedule as plain text, with one row per stage and one column per slot of time."""

from __future__ import annotations

from meshdsl.lowering.pipelines.actions import Action, Kind
from meshdsl.lowering.pipelines.costs import Costs
from meshdsl.lowering.pipelines.planning import plan
from meshdsl.lowering.pipelines.plans import Plan, Span
from meshdsl.lowering.pipelines.schedule import Schedule

_IDLE = "."
_GOES_ON = "-"


def show(
    schedule: Schedule, costs: Costs | None = None, *, slot: float = 0.0, width: int = 100
) -> str:
    """Returns a schedule as text, with the action of each stage in each slot of time.

    A row is a stage, and a column is a slot. A cell has the action that starts in the slot. It is
    `-` if the action continues, and `.` if the stage waits. With one chunk per stage, actions are
    `F3` instead of `4F3`. If a table is too wide, its remaining columns follow below.

        1f1b: 2 stages, 2 chunks, 3 microbatches; bubble 25 %
        slot     0  1  2  3  4  5  6  7  8  9 10 11  live
        stage 0 F0 F1  .  . B0  - F2 B1  -  . B2  -     2
        stage 1  . F0 B0  - F1 B1  - F2 B2  -  .  .     1

    Args:
        schedule: a correct schedule.
        costs: the times of the actions. By default F = I = W = 1 and B = 2.
        slot: the time of a column; by default the shortest time of an action.
        width: the largest number of characters in a line.

    Raises:
        ValueError: The schedule is incorrect, or `costs` has another number of chunks.
    """
    return show_plan(plan(schedule, costs), slot=slot, width=width)


def show_plan(plan: Plan, *, slot: float = 0.0, width: int = 100) -> str:
    """Returns a plan as text, in the format of `show`."""
    schedule = plan.schedule
    times = [s.end - s.start for row in plan.spans for s in row if s.end > s.start]
    slot = slot or min(times, default=1.0)
    columns = round(plan.makespan / slot + 0.49)
    brief = schedule.rounds == 1
    grid = [_cells(row, columns, slot, brief) for row in plan.spans]
    names = [f"stage {stage}" for stage in range(schedule.stages)]
    first = max(map(len, names))
    size = max([len(str(columns - 1)), *(len(cell) for row in grid for cell in row)])
    per_line = max(1, (width - first - len("  live 0000")) // (size + 1))
    lines = [headline(plan)]
    for begin in range(0, columns, per_line):
        part = range(begin, min(columns, begin + per_line))
        last = part.stop == columns
        lines.append(_line("slot", first, [str(n) for n in part], size, "live" if last else ""))
        for name, row, peak in zip(names, grid, plan.peaks, strict=True):
            kept = f"{peak:g}" if last else ""
            lines.append(_line(name, first, row[part.start : part.stop], size, kept))
    return "\n".join(lines) + "\n"


def headline(plan: Plan) -> str:
    """Returns a line with the sizes of a schedule and its bubble."""
    schedule = plan.schedule
    counts = [
        _many(schedule.stages, "stage"),
        _many(schedule.chunks, "chunk"),
        _many(schedule.microbatches, "microbatch", "es"),
    ]
    return f"{schedule.name}: {', '.join(counts)}; bubble {100 * plan.bubble:.3g} %"


def _many(count: int, noun: str, plural: str = "s") -> str:
    return f"{count} {noun}{'' if count == 1 else plural}"


def _cells(row: tuple[Span, ...], columns: int, slot: float, brief: bool) -> list[str]:
    """Returns the cells of a stage. A cell shows the action in the middle of its slot."""
    cells = [_IDLE] * columns
    for span in row:
        begun = False
        for column in range(int(span.start / slot), columns):
            middle = (column + 0.5) * slot
            if span.start <= middle < span.end:
                cells[column] = _GOES_ON if begun else _label(span.action, brief)
                begun = True
            elif middle >= span.end:
                break
    return cells


def _label(action: Action, brief: bool) -> str:
    if action.kind == Kind.OVERLAP:
        return "+".join(_label(part, brief) for part in action.parts)
    return f"{action.kind}{action.microbatch}" if brief else str(action)


def _line(name: str, first: int, cells: list[str], size: int, end: str) -> str:
    text = " ".join(f"{cell:>{size}}" for cell in cells)
    return f"{name:<{first}} {text}" + (f"  {end:>4}" if end else "")
