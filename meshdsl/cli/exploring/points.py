"""Points: which plans a page has, in the order in which they are computed.

First those that the user writes. Then, by turns, what differs from the first of them by one thing,
and what `meshdsl plan` looks at: the points of its search, those with the least bounds on time or
memory first. At the end, what differs by two rules. Whoever edits a layout so finds the next plan
computed, and the Pareto front is that of good plans.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

from meshdsl.layouts.layout import Layout, Rule
from meshdsl.layouts.mesh import Mesh
from meshdsl.reports.explore.choices import Choice
from meshdsl.search.candidates import Candidate
from meshdsl.search.facts import Facts

_ALIKE = 2  # points of a search with the same mesh and layout
_MOST_STORED = 2  # dims of parameters whose storage is edited
_STORAGES = ("optimizer", "params")
_T = TypeVar("_T")


def by_turns(*sources: Iterable[_T]) -> Iterator[_T]:
    """Yields one of each source, then one of each again, until all are empty.

    >>> list(by_turns("abc", "1"))
    ['a', '1', 'b', 'c']
    """
    waiting = [iter(source) for source in sources]
    while waiting:
        for source in list(waiting):
            try:
                yield next(source)
            except StopIteration:
                waiting.remove(source)


def different(choices: Iterable[Choice]) -> Iterator[Choice]:
    """Yields choices, each plan once."""
    known: set[tuple] = set()
    for choice in choices:
        if choice.key not in known:
            known.add(choice.key)
            yield choice


def in_order(
    choices: Sequence[Choice], results: Iterable[tuple[Choice, _T]]
) -> Iterator[tuple[Choice, _T]]:
    """Yields results in the order of the choices, whichever comes first; some may be missing."""
    early: dict[Choice, _T] = {}
    waiting = iter(choices)
    expected = next(waiting, None)
    for choice, result in results:
        early[choice] = result
        while expected in early:
            yield expected, early.pop(expected)
            expected = next(waiting, None)
    for choice in waiting:
        if choice in early:
            yield choice, early[choice]


def of_search(candidates: Iterable[Candidate]) -> Iterator[Choice]:
    """Yields the points of a search, by turns those with the least time, and the least product of
    time and memory: so there are also plans for when the fastest do not fit."""
    rows = list(candidates)
    fast = _variants(sorted(rows, key=lambda row: (row.bound, row.order)))
    small = _variants(sorted(rows, key=lambda row: (row.bound * row.peak, row.order)))
    return different(by_turns(fast, small))


def _variants(rows: Iterable[Candidate]) -> Iterator[Choice]:
    """Yields points, at most some with the same mesh and layout."""
    alike: dict[tuple[Mesh, Layout], int] = {}
    for row in rows:
        point = row.point
        key = point.mesh, point.layout
        alike[key] = alike.get(key, 0) + 1
        if alike[key] <= _ALIKE:
            variant = point.variant
            yield Choice(str(key[0]), str(key[1]), variant.microbatches, variant.remat)


def on_meshes(choice: Choice, meshes: Iterable[str]) -> Iterator[Choice]:
    """Yields a choice on each mesh that has the axes of its layout."""
    axes = {axis for rule in Layout.parse(choice.layout).rules for axis in rule.axes}
    for mesh in dict.fromkeys(meshes):
        if axes <= {axis for axis, _ in Mesh.parse(mesh).axes}:
            yield replace(choice, mesh=mesh)


def edited(choice: Choice, facts: Facts, times: int) -> Iterator[Choice]:
    """Yields what differs from a choice by so many rules of its layout."""
    layout, mesh = Layout.parse(choice.layout), Mesh.parse(choice.mesh)
    single = [_rules(target, mesh) for target in _targets(layout, facts)]
    for several in itertools.combinations(single, times):
        for rules in itertools.product(*several):
            text = str(_with(layout, [rule for rule in rules if rule is not None]))
            yield Choice(choice.mesh, text, choice.microbatches, choice.remat)


def dims_of(facts: Facts) -> list[str]:
    """Returns the dims that can be split, those of most bytes first."""
    held: dict[str, int] = {}
    for row in (*facts.inputs, *facts.peak):
        for dim, size in row.dims.items():
            if size > 1:
                held[dim] = held.get(dim, 0) + row.bytes
    return sorted(held, key=lambda dim: (-held[dim], dim))


def _targets(layout: Layout, facts: Facts) -> list[str]:
    """Returns what rules may be about: dims, and the dims of parameters as they are stored."""
    stored = [dim for dim in dims_of(facts) if any(dim in row.dims for row in facts.parameters)]
    scoped = [f"{scope}/{dim}" for dim in stored[:_MOST_STORED] for scope in _STORAGES]
    written = [rule.target for rule in layout.rules]
    return [*dict.fromkeys([*written, *dims_of(facts), *scoped])]


def _rules(target: str, mesh: Mesh) -> list[Rule]:
    scope, _, dim = target.rpartition("/")
    axes = [axis for axis, size in mesh.axes if size > 1]
    found = [Rule(scope, dim, ()), *(Rule(scope, dim, (axis,)) for axis in axes)]
    return [*found, *(Rule(scope, dim, (axis,), True) for axis in axes if not scope)]


def _with(layout: Layout, rules: Sequence[Rule]) -> Layout:
    """Returns a layout with other rules for some targets; empty ones without a scope are gone."""
    changed = {rule.target: rule for rule in rules}
    kept = [changed.pop(rule.target, rule) for rule in layout.rules]
    found = (*kept, *changed.values())
    return Layout(tuple(rule for rule in found if rule.axes or rule.scope))
