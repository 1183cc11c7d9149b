"""Candidates: all points of a space that may fit, with their least time and memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from meshdsl.layouts.layout import Layout
from meshdsl.layouts.mesh import Mesh
from meshdsl.search.bounds import Bounds, as_arrays
from meshdsl.search.facts import Facts, stand_in
from meshdsl.search.plans import Step
from meshdsl.search.roles import main_roles, roles_of
from meshdsl.search.space import (
    Point,
    Structure,
    Variant,
    across_slices,
    factorisations,
    largest,
    stored_ways,
    structure_of,
    structures,
    structures_on,
)

LIGHT = 1000  # instructions of a program that is lowered in about a quarter of a second


@dataclass(frozen=True)
class Candidate:
    """A point that may fit.

    Attributes:
        bound: its least time, in seconds.
        peak: its least memory, in bytes.
        waits: what of the bound are waits; an estimate of all waits replaces them.
        order: its number among the points that may fit.
        estimate: an estimate of the time of its step, in seconds.
    """

    point: Point
    bound: float
    peak: float
    order: int
    estimate: float = float("inf")
    waits: float = 0.0


@dataclass(frozen=True)
class Enumeration:
    """The enumeration of a space.

    Attributes:
        pinned: rules that every layout has.
        closed: whether these are the complete layout.
        room: the bytes that a device may use.
        bounds: returns the bounds of a variant.
        late: whether to stop, with the points so far if there are some.
    """

    step: Step
    devices: int | Mesh
    slices: int
    pinned: Layout
    closed: bool
    room: float
    bounds: Callable[[Variant], Bounds]
    late: Callable[[], bool] = lambda: False

    def run(self) -> tuple[list[Candidate], int, float]:
        """Returns the points that may fit, the number of points, and the least of all peaks."""
        found: list[Candidate] = []
        points, least = 0, float("inf")
        for remat in self.step.remats:
            for counts in self._counts():
                variant = Variant(stand_in(counts[0]), remat)
                bounds = self.bounds(variant)
                for structure in self._structures(bounds.facts):
                    if found and self.late():
                        return found, points, least
                    rows = self._sizes(structure, bounds.facts)
                    if not rows:
                        continue
                    sizes, parts = as_arrays(rows, counts)
                    allowed = self._allowed(structure, bounds.facts, sizes, parts)
                    sizes, parts = sizes[allowed], parts[allowed]
                    if not len(sizes):
                        continue
                    seconds = bounds.seconds(structure, sizes, parts)
                    waits = bounds.waits(structure, sizes, parts)
                    only = self.closed or self.devices == 1
                    ways = [structure] if only else stored_ways(structure, bounds.facts)
                    for stored in ways:
                        peak = bounds.peak_bytes(stored, sizes, parts)
                        work = seconds + waits + bounds.update_seconds(stored, sizes, parts)
                        points += len(sizes)
                        least = min(least, float(peak.min()))
                        for at in np.flatnonzero(self.closed | (peak <= self.room)):
                            point = Point(
                                stored,
                                tuple(map(int, sizes[at])),
                                Variant(int(parts[at]), remat),
                            )
                            figures = float(work[at]), float(peak[at]), len(found)
                            found.append(Candidate(point, *figures, waits=float(waits[at])))
        return found, points, least

    def _counts(self) -> Iterator[tuple[int, ...]]:
        """Yields the numbers of microbatches that one program stands for."""
        alike: dict[int, list[int]] = {}
        for count in self.step.microbatches:
            alike.setdefault(stand_in(count), []).append(count)
        for _, counts in sorted(alike.items()):
            yield tuple(counts)

    def _structures(self, facts: Facts) -> Iterator[Structure]:
        if self.closed:
            mesh = self.devices if isinstance(self.devices, Mesh) else None
            given = structure_of(mesh, self.pinned, facts)
            whole = mesh is not None or self.slices == 1
            yield from [given] if whole else across_slices(given)
            return
        roles = roles_of(facts)
        if facts.microbatches == 1:  # stages need microbatches
            roles = tuple(role for role in roles if role.kind != "stack")
        if facts.instructions > 2 * LIGHT:  # each program takes seconds
            roles = main_roles(roles)
        if isinstance(self.devices, Mesh):
            yield from structures_on(self.devices, roles, self.pinned)
        elif self.devices == 1:  # its mesh has the axes of the given rules
            yield structure_of(None, self.pinned, facts)
        else:
            yield from structures(roles, self.pinned, self.slices)

    def _sizes(self, structure: Structure, facts: Facts) -> list[tuple[int, ...]]:
        if isinstance(self.devices, Mesh):
            return [tuple(self.devices.sizes[axis] for axis in structure.axes)]
        if self.devices == 1 or not structure.axes:
            return [(1,) * len(structure.axes)]
        first = (self.slices,) if self.slices > 1 else ()
        rest = self.devices // self.slices
        others = structure.roles[len(first) :]
        most = [rest if self.closed else largest(role, facts) for role in others]
        if not most:
            return [first] if rest == 1 else []
        return [(*first, *sizes) for sizes in factorisations(rest, len(most), most)]

    def _allowed(
        self, structure: Structure, facts: Facts, sizes: np.ndarray, parts: np.ndarray
    ) -> np.ndarray:
        """Returns which points make sense: no empty shards, and enough microbatches for stages."""
        allowed = np.ones(len(sizes), bool)
        for number, role in enumerate(structure.roles):
            if role.kind == "data" and role.splits:
                batch = max(row.dims.get(role.splits[0], 1) for row in facts.inputs)
                extent = np.prod(
                    [sizes[:, i] for i, r in enumerate(structure.roles) if r.kind == "data"], axis=0
                )
                allowed &= batch // parts >= extent
            if role.kind == "stack":
                allowed &= parts >= sizes[:, number]
        return allowed
