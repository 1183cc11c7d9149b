"""Against: another layout beside the best one, and the best one without each of its rules."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from meshdsl.layouts.layout import Layout, Rule
from meshdsl.layouts.mesh import Mesh
from meshdsl.lowering.costs.simulation import step_seconds
from meshdsl.lowering.program import SpmdProgram
from meshdsl.search.plans import Plan
from meshdsl.search.searching import Search
from meshdsl.search.space import factorisations


def best_mesh(
    search: Search, plan: Plan, layout: Layout, mesh: Mesh | None = None
) -> tuple[Mesh, SpmdProgram]:
    """Returns the program of another layout for a plan's devices, and its mesh.

    Without a given mesh, the plan's mesh is taken if it has all axes of the layout. Otherwise every
    mesh of these axes is tried, and the fastest that fits into memory is taken; if none fits, the
    fastest.

    Raises:
        ValueError: the layout fits the program on no mesh.
    """
    variant = plan.point.variant
    axes = list(dict.fromkeys(axis for rule in layout.rules for axis in rule.axes))
    if mesh is None and set(axes) <= set(plan.program.mesh.names):
        mesh = plan.program.mesh
    if mesh is not None:
        return mesh, search.program(mesh, layout, variant)
    size = plan.program.mesh.size
    meshes = [*_meshes(axes, size, search.slices)]
    best: tuple[bool, float, Mesh, SpmdProgram] | None = None
    reason: ValueError | None = None
    for candidate in meshes:
        try:
            program = search.program(candidate, layout, variant, search.quick)
        except ValueError as error:
            reason = error
            continue
        seconds = step_seconds(program, search.hardware)
        row = program.peak_bytes > search.room, seconds, candidate, program
        if best is None or row[:2] < best[:2]:
            best = row
    if best is None:
        across = f", of which one goes across {search.slices} slices" if search.slices > 1 else ""
        names = ", ".join(axes)
        raise reason or ValueError(f"{size:,} devices have no mesh of the axes {names}{across}")
    return best[2], search.program(best[2], layout, variant)


def _meshes(axes: Sequence[str], size: int, slices: int) -> Iterator[Mesh]:
    """Yields the meshes of some axes on all devices; one axis goes across the slices, and first."""
    if slices == 1:
        for sizes in factorisations(size, len(axes), [size] * len(axes)):
            yield Mesh(tuple(zip(axes, sizes, strict=True)))
        return
    rest = size // slices
    for slow in axes:
        others = [axis for axis in axes if axis != slow]
        ways = factorisations(rest, len(others), [rest] * len(others)) if others else [()]
        for sizes in ways if others or rest == 1 else ():
            pairs = ((slow, slices), *zip(others, sizes, strict=True))
            yield Mesh(pairs, frozenset([slow]))


def without_rules(search: Search, plan: Plan) -> Iterator[tuple[Rule, float, int, bool, str]]:
    """Yields each rule of a plan, with figures of the step without this rule.

    The figures are the seconds of the step, its peak in bytes, whether it fits, and the reason if
    there is no such step ("" if there is one).
    """
    rules = plan.point.layout.rules
    for rule in rules:
        layout = Layout(tuple(other for other in rules if other is not rule))
        options = search.exact if plan.memory is None else replace(search.exact, memory=plan.memory)
        try:
            program = search.program(plan.program.mesh, layout, plan.point.variant, options)
        except ValueError as error:
            yield rule, 0.0, 0, False, f"not possible: {str(error).splitlines()[0]}"
            continue
        seconds = step_seconds(program, search.hardware)
        yield rule, seconds, program.peak_bytes, program.peak_bytes <= search.room, ""
