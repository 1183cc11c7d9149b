"""Simplified: the plan with the fewest rules that takes little more time than the fastest one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from meshdsl.layouts.layout import Layout
from meshdsl.lowering.costs.simulation import step_seconds
from meshdsl.search.plans import Plan, Plans
from meshdsl.search.searching import Search
from meshdsl.search.space import Point, structure_of


def simplified(search: Search, plans: Plans, share: float) -> Plans:
    """Returns plans whose first is one with fewer rules; the same plans if there is none.

    It begins with the plan of the fewest rules that was found, and leaves out one rule after the
    other: the one without which the step is fastest. The user's rules stay, and so does a rule for
    every axis. What is left out was lowered and simulated, as all plans.

        simplified(search, plans, 0.02).best.point.layout

    Args:
        share: the share of the fastest plan's time that fewer rules may cost.
    """
    limit = (1 + share) * plans.best.seconds
    near = [plan for plan in plans.plans if plan.seconds <= limit]
    plan = min(near, key=lambda plan: (len(plan.point.layout.rules), plan.seconds))
    while fewer := min(
        _without_one(search, plan, limit), key=lambda plan: plan.seconds, default=None
    ):
        plan = fewer
    if len(plan.point.layout.rules) == len(plans.best.point.layout.rules):
        return plans
    others = (other for other in plans.plans if other is not plan)
    return replace(plans, plans=(plan, *others), simplified_from=plans.best)


def _without_one(search: Search, plan: Plan, limit: float) -> Iterator[Plan]:
    """Yields a plan without one of its rules, for each that fits and keeps the limit of time."""
    variant, mesh = plan.point.variant, plan.program.mesh
    rules = plan.point.layout.rules
    kept = {rule.target for rule in search.pinned.rules}
    options = search.exact if plan.memory is None else replace(search.exact, memory=plan.memory)
    for rule in rules:
        if search.is_late():
            return
        layout = Layout(tuple(other for other in rules if other is not rule))
        used = {axis for other in layout.rules for axis in other.axes}
        if rule.target in kept or not used.issuperset(a for a, size in mesh.axes if size > 1):
            continue
        try:
            program = search.program(mesh, layout, variant, options)
        except ValueError:  # the other rules need this one
            continue
        seconds = step_seconds(program, search.hardware)
        if seconds <= limit and program.peak_bytes <= search.room:
            structure = structure_of(mesh, layout, search.bounds(variant).facts)
            point = Point(structure, tuple(mesh.sizes[a] for a in structure.axes), variant)
            yield replace(plan, point=point, program=program, seconds=seconds, decided=True)
