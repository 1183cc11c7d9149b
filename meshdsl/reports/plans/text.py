"""The text of plans: the best one with its parts, the runners-up, and what less memory costs."""

from __future__ import annotations

from collections.abc import Sequence

from meshdsl.lowering.costs.units import show_bytes, show_seconds, show_share
from meshdsl.reports.explain.lines import table, wrapped
from meshdsl.reports.explain.text import MEANING
from meshdsl.reports.plans.figures import Figures, Heading
from meshdsl.reports.plans.rules import Without
from meshdsl.search.plans import Plan, Plans

_WIDTH = 120
_RUNNERS_UP = 6
_WAITS = 4


def show(heading: Heading, plans: Plans, rows: Sequence[Figures], commands: Sequence[str]) -> str:
    """Returns the report.

    Args:
        rows: the figures of all plans that fit, the fastest first, then of those that do not.
    """
    fitting = [row for row in rows if row.plan.fits]
    sections = [_head(heading, plans, fitting[0]), _best(heading, plans, fitting[0])]
    sections.append(_others(fitting[0], [row for row in rows if row is not fitting[0]]))
    sections.append(_front(heading, plans, fitting))
    sections.append(["to run it", *(f"  {command}" for command in commands)])
    return "\n\n".join("\n".join(section) for section in sections if section)


def _head(heading: Heading, plans: Plans, best: Figures) -> list[str]:
    kind = f", in {best.dtype}" if best.dtype is not None else ""
    return [
        *wrapped("", f"{heading.model} on {heading.machine}, batch {heading.batch}{kind}", _WIDTH),
        *wrapped("", _certificate(plans), _WIDTH),
        *wrapped("to be faster: ", best.faster, _WIDTH),
    ]


def _certificate(plans: Plans) -> str:
    several = "plans" if plans.points > 1 else "plan"
    were = "were" if plans.lowered > 1 else "was"
    text = f"the best of {plans.points:,} {several}; {plans.lowered:,} {were} lowered and simulated"
    if plans.bound is not None:
        if plans.gap:
            text += f", all others take at least {show_seconds(plans.bound)}: "
            text += f"at most {show_share(plans.gap)} above the optimum of this space"
        else:
            text += ", and no other can be faster"
    return text if plans.complete else f"{text} (stopped early: the best so far)"


def _best(heading: Heading, plans: Plans, best: Figures) -> list[str]:
    program = best.plan.program
    memory = plans.hardware.memory_bytes
    rate = heading.count / best.seconds
    flops = show_share(best.flops_share)
    lines = []
    if program.mesh.axes:
        lines += wrapped("  mesh    ", str(program.mesh), _WIDTH)
        lines += wrapped("  layout  ", str(best.plan.point.layout), _WIDTH)
    lines += [f"  flags   {best.flags}"] if best.flags else []
    if plans.simplified_from is not None:
        lines += wrapped("  simpler ", _simpler(plans.best, plans.simplified_from), _WIDTH)
    step = f"{show_seconds(best.seconds)}: {show_seconds(best.work)} of work"
    if best.waits:
        step += f", {show_seconds(best.exposed)} of waiting for what is sent"
    step += f"; {rate:,.0f} {heading.unit}/s, {flops} of the {best.peak_of} peak"
    lines += wrapped("  step    ", step, _WIDTH)
    waits = [
        f"{show_seconds(seconds)} for {kind} over {axes}"
        for (kind, axes), seconds in list(best.waits.items())[:_WAITS]
    ]
    lines += wrapped("  waits   ", ", ".join(waits), _WIDTH)
    parts = [f"{MEANING[part][0]} {show_bytes(count)}" for part, count in best.memory.items()]
    peak = f"{show_bytes(best.plan.peak_bytes)} of {show_bytes(memory)}"
    lines += wrapped("  memory  ", f"{peak}: {', '.join(parts)}", _WIDTH)
    return ["the best plan", *lines, f"  limit   {best.limit}"]


def _simpler(best: Plan, fastest: Plan) -> str:
    """Returns how many rules a plan saves, and what that costs."""
    count, before = len(best.point.layout.rules), len(fastest.point.layout.rules)
    more = show_share(best.seconds / fastest.seconds - 1)
    other = f"{fastest.program.mesh} | {fastest.point.layout}"
    return f"{count} rule{'s' if count > 1 else ''} instead of {before}, {more} slower than {other}"


def _others(best: Figures, others: Sequence[Figures]) -> list[str]:
    if not others:
        return []
    lines = ["runners-up: what makes them worse"]
    for row in others[:_RUNNERS_UP]:
        slower = row.seconds / best.seconds - 1
        head = f"  {100 * slower:+6.1f} %  {show_bytes(row.plan.peak_bytes):>9}  "
        where = [f"{row.plan.program.mesh}" or "one device", str(row.plan.point.layout), row.flags]
        lines += wrapped(head, " | ".join(filter(None, where)), _WIDTH)
        lines += wrapped(" " * len(head), row.worse(best), _WIDTH)
    return lines


def _front(heading: Heading, plans: Plans, rows: Sequence[Figures]) -> list[str]:
    front = set(map(id, plans.front))
    chosen = sorted((row for row in rows if id(row.plan) in front), key=lambda row: row.seconds)
    if len(chosen) < 2:
        return []
    listed = [("step", "memory", "mesh", "layout", "")]
    for row in chosen:
        mesh, layout = str(row.plan.program.mesh), str(row.plan.point.layout)
        time, peak = show_seconds(row.seconds), show_bytes(row.plan.peak_bytes)
        listed.append((time, peak, mesh, layout, row.flags))
    return ["less memory, more time", *table(listed, right=(0, 1), squeezed=3, width=_WIDTH)]


def show_against(
    comparison: str,
    best: Figures,
    other: str,
    without: Sequence[Without],
    flags: str = "",
    same: bool = False,
) -> str:
    """Returns the difference from another layout, and what each rule of the best one is worth.

    Args:
        flags: those of the other layout's step, as `best.flags`.
        same: whether the other one is the layout of the best plan, on the same mesh.
    """
    rows = [("without", "step", "memory")]
    rows += [(str(one.rule), *one.change(best.seconds, best.plan.peak_bytes)) for one in without]
    lines = [f"the best plan (A) against {other} (B)"]
    if same and flags == best.flags:
        lines.append("B is the best plan itself.")
    elif same:
        lines.append("B is the mesh and layout of the best plan; only the flags differ.")
    if flags != best.flags:
        lines += [f"  flags of A  {best.flags or 'none'}", f"  flags of B  {flags or 'none'}"]
    lines += ["", comparison, ""]
    if without:
        lines += ["the step of the best plan, without one of its rules"]
        lines += table(rows, right=(1, 2), width=_WIDTH)
    return "\n".join(lines)


def show_remedies(problem: str, remedies: Sequence[tuple[str, Figures | None]]) -> str:
    """Returns why nothing fits, and what would make it fit.

    Args:
        remedies: each change, and the plan that fits then; None: it does not help.
    """
    lines = wrapped("", problem, _WIDTH)
    helpful = [(change, row) for change, row in remedies if row is not None]
    if not remedies:  # the user has stopped it
        return "\n".join(lines)
    if not helpful:
        tried = ", ".join(change for change, _ in remedies)
        return "\n".join([*lines, f"nothing that was tried makes it fit: {tried}"])
    lines.append("what makes it fit, the least change first")
    for change, row in helpful:
        assert row is not None
        cost = f"{show_seconds(row.seconds)}, {show_bytes(row.plan.peak_bytes)}"
        lines += wrapped(
            f"  {change}: ",
            f"{cost}; {row.plan.program.mesh} | {row.plan.point.layout} {row.flags}",
            _WIDTH,
        )
    return "\n".join(lines)
