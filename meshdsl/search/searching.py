"""Searching: the best points of a space, and a bound on all that was not lowered.

Points are cut in this order, from cheap to exact:

1. `bounds` give the least time and memory of every point. What cannot fit is left out.
2. Those with the least time get an estimate of what they send (`traffic`).
3. The best by that are lowered as they are, and simulated.
4. The best of these are lowered as `explain` does: with what time decides.

The search is deterministic: it counts points, not seconds, unless it is given a limit of time.
"""

from __future__ import annotations

import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from meshdsl.layouts.calibration import find_hardware
from meshdsl.layouts.hardware import Hardware
from meshdsl.layouts.layout import Layout
from meshdsl.layouts.mesh import Mesh
from meshdsl.lowering.costs.simulation import step_seconds
from meshdsl.lowering.lower import lower
from meshdsl.lowering.options import Options
from meshdsl.lowering.program import SpmdProgram
from meshdsl.search.bounds import Bounds, as_arrays
from meshdsl.search.facts import ONE_DEVICE, PARTS, Facts
from meshdsl.search.roles import Role, roles_of
from meshdsl.search.space import (
    Point,
    Structure,
    Variant,
    devices_of,
    factorisations,
    largest,
    stored_ways,
    structures,
    structures_on,
)
from meshdsl.search.traffic import ALONE, Traffic
from meshdsl.tracing.graph import Graph

ROOM = 0.85  # the share of the memory that plans may use: compilers may need more than planned
_ALIKE = 4  # of how many variants of a mesh and layout the traffic is estimated
_TIGHTER = 1.1  # about what a step is slower by if its program has to be made smaller


@dataclass(frozen=True)
class Step:
    """What is planned: a function, and what may be varied of it.

    Attributes:
        graph: traces a variant.
        donated: for the inputs of a graph, whether an output may be written over them.
        microbatches, remats: what variants may have.
        options: those that the user has given.
    """

    graph: Callable[[Variant], Graph]
    donated: Callable[[Graph], Sequence[bool]]
    microbatches: tuple[int, ...] = (1,)
    remats: tuple[str, ...] = ("",)
    options: Options = field(default_factory=Options)


@dataclass(frozen=True)
class Effort:
    """How many points each stage of a search takes.

    Attributes:
        estimated: those whose traffic is estimated; `tried`: those lowered as they are; `decided`:
            those lowered with what time decides.
        seconds: the time after which no further point is lowered; None: there is no limit.
    """

    estimated: int = 200
    tried: int = 8
    decided: int = 2
    seconds: float | None = None


@dataclass(frozen=True)
class Plan:
    """A point that was lowered.

    Attributes:
        program: what one device does.
        seconds: the simulated time of a step.
        bound: the least time of this point by arithmetic alone.
        decided: whether time has decided about the program, as in `explain` on known hardware.
        memory: the limit of memory with which the program was lowered, if it needs one to fit.
    """

    point: Point
    program: SpmdProgram
    seconds: float
    bound: float
    decided: bool = False
    memory: int | None = None

    @property
    def peak_bytes(self) -> int:
        return self.program.peak_bytes


@dataclass(frozen=True)
class Plans:
    """What a search has found.

    Attributes:
        plans: those that fit, the fastest first.
        tight: those that do not, the one that needs the least memory first.
        bound: the least time of every point that was not lowered with what time decides; None: all
            of them were.
        points: how many there are; `fitting`: how many of them may fit, by their bounds.
        least_bytes: the least memory of a point, by its bound.
        room: the bytes that a device may use.
    """

    hardware: Hardware
    plans: tuple[Plan, ...]
    tight: tuple[Plan, ...]
    bound: float | None
    points: int
    fitting: int
    lowered: int
    least_bytes: float
    room: float

    @property
    def best(self) -> Plan:
        return self.plans[0]

    @property
    def gap(self) -> float:
        """By how much the best plan may be slower than the best of the space, at most."""
        if self.bound is None or self.bound >= self.best.seconds:
            return 0.0
        return self.best.seconds / self.bound - 1


def search(
    step: Step,
    hardware: str,
    devices: int | Mesh,
    pinned: Layout | None = None,
    effort: Effort | None = None,
) -> Plans:
    """Returns the best plans for a step: `search(step, "v5p", 64).best.point.layout`.

    Args:
        hardware: a name, or the file of a calibration.
        devices: how many there are, or their mesh.
        pinned: rules that every layout has.

    Raises:
        ValueError: no point of the space can be lowered; with the last reason.
    """
    return Search(step, hardware, devices, pinned, effort).run()


@dataclass(frozen=True)
class _Candidate:
    """A point that may fit.

    Attributes:
        bound: its least time; `peak`: its least memory.
        order: its number among all points.
        estimate: about how long its step takes.
    """

    point: Point
    bound: float
    peak: float
    order: int
    estimate: float = float("inf")


class Search:
    """One search.

    Attributes:
        room: the bytes that a device may use.
    """

    def __init__(
        self,
        step: Step,
        hardware: str,
        devices: int | Mesh,
        pinned: Layout | None = None,
        effort: Effort | None = None,
    ) -> None:
        self.step, self.devices = step, devices
        self.pinned, self.effort = pinned or Layout(), effort or Effort()
        self.name, self.hardware = hardware, find_hardware(hardware)
        limit = step.options.memory
        self.room = ROOM * self.hardware.memory_bytes if limit is None else float(limit)
        seconds = self.effort.seconds
        self.until = None if seconds is None else time.monotonic() + seconds
        self._graphs: dict[Variant, Graph] = {}
        self._bounds: dict[Variant, Bounds] = {}
        self._traffic: dict[Variant, Traffic] = {}
        self.reason: ValueError | None = None

    def run(self) -> Plans:
        """Returns the plans; raises as `search`."""
        candidates, points, least = self.candidates()
        candidates.sort(key=lambda row: (row.bound, row.order))
        rows = [self.estimated(row) for row in self._first(candidates)]
        tried: dict[int, Plan] = {}
        for at in self._promising(rows, tried):
            program = self._lower(rows[at].point, self._quick)
            if program is None:
                rows[at] = replace(rows[at], estimate=float("inf"))
            else:
                seconds = step_seconds(program, self.hardware)
                tried[at] = Plan(rows[at].point, program, seconds, rows[at].bound)
        if not tried:
            raise self._nothing(points, least)

        def order(at: int) -> tuple[float, int]:
            fits = tried[at].peak_bytes <= self.room
            return tried[at].seconds * (1 if fits else _TIGHTER), at

        decided: dict[int, Plan] = {}
        for at in sorted(tried, key=order)[: self.effort.decided]:
            if not (decided and self._late()):
                decided[at] = self._decided(tried[at])
        found = sorted({**tried, **decided}.items(), key=lambda row: (row[1].seconds, row[0]))
        plans = [plan for _, plan in found if plan.peak_bytes <= self.room]
        tight = [plan for _, plan in found if plan.peak_bytes > self.room]
        sure = {rows[at].order for at in decided}
        refined = {row.order: row.bound for row in rows}
        rest = [refined.get(row.order, row.bound) for row in candidates if row.order not in sure]
        return Plans(
            self.hardware,
            tuple(plans),
            tuple(sorted(tight, key=lambda plan: plan.peak_bytes)),
            min(rest, default=None),
            points,
            len(candidates),
            len(tried),
            least,
            self.room,
        )

    def _first(self, candidates: Sequence[_Candidate]) -> list[_Candidate]:
        """Returns the candidates with the least bounds, few of each mesh and layout."""
        chosen: list[_Candidate] = []
        alike: Counter[tuple] = Counter()
        for row in candidates:
            key = row.point.structure, row.point.sizes
            if len(chosen) < self.effort.estimated and alike[key] < _ALIKE:
                alike[key] += 1
                chosen.append(row)
        return chosen

    def estimated(self, row: _Candidate) -> _Candidate:
        """Returns a candidate with all of its bound, and an estimate of its step."""
        bound = self.bounds(row.point.variant).least(row.point, row.bound)
        return replace(row, bound=bound, estimate=bound + self._sent(row.point))

    def _promising(self, rows: Sequence[_Candidate], tried: Mapping[int, Plan]) -> Iterator[int]:
        """Yields the rows to lower, by their estimates and what was found of others meanwhile.

        Estimates of one structure err alike, so each is scaled as the tried ones were found to be.
        """
        limit = min(self.effort.tried, len(rows))
        failed: set[int] = set()
        for _ in range(2 * limit):
            if len(tried) == limit or (tried and self._late()):
                return
            time, memory = _errors(rows, tried)
            best, least = None, float("inf")
            for at, row in enumerate(rows):
                if at in tried or at in failed:
                    continue
                structure = row.point.structure
                predicted = row.estimate * time.get(structure.roles, 1.0)
                if row.peak * memory.get((structure, row.point.variant.remat), 1.0) > self.room:
                    predicted *= _TIGHTER
                if predicted < least:
                    best, least = at, predicted
            if best is None:
                return
            failed.add(best)
            yield best

    def _decided(self, plan: Plan) -> Plan:
        """Returns a plan with the program that is chosen by time, and that fits if one does."""
        options = self.exact
        if plan.peak_bytes > self.room:
            options = replace(options, memory=int(self.room))
        program = self._lower(plan.point, options)
        if program is None:
            return plan
        if program.peak_bytes > self.room and options.memory is None:
            options = replace(options, memory=int(self.room))
            program = self._lower(plan.point, options) or program
        seconds = step_seconds(program, self.hardware)
        limit = None if self.step.options.memory is not None else options.memory
        return replace(plan, program=program, seconds=seconds, decided=True, memory=limit)

    def _late(self) -> bool:
        return self.until is not None and time.monotonic() > self.until

    def _nothing(self, points: int, least: float) -> ValueError:
        if self.reason is not None:
            return self.reason
        from meshdsl.lowering.costs.units import show_bytes

        if not points:
            where = self.devices if isinstance(self.devices, Mesh) else f"{self.devices} devices"
            return ValueError(
                f"no layout found: nothing of this program can be split over {where}; give a "
                "layout, or fewer devices"
            )
        return ValueError(
            f"no layout fits: each of {points:,} needs more than {show_bytes(self.room)} of a "
            f"device, the smallest at least {show_bytes(least)}; take more devices, a smaller "
            "batch, or --memory for another limit"
        )

    def candidates(self) -> tuple[list[_Candidate], int, float]:
        """Returns the points that may fit, the number of all, and the least memory of any."""
        found: list[_Candidate] = []
        points, least = 0, float("inf")
        for remat in self.step.remats:
            for counts in self._counts():
                variant = Variant(min(counts[0], PARTS), remat)
                bounds = self.bounds(variant)
                for structure in self._structures(bounds.facts):
                    rows = self._sizes(structure, bounds.facts)
                    if not rows:
                        continue
                    sizes, parts = as_arrays(rows, counts)
                    allowed = self._allowed(structure, bounds.facts, sizes, parts)
                    sizes, parts = sizes[allowed], parts[allowed]
                    if not len(sizes):
                        continue
                    seconds = bounds.seconds(structure, sizes, parts)
                    for stored in stored_ways(structure, bounds.facts):
                        peak = bounds.peak_bytes(stored, sizes, parts)
                        work = seconds + bounds.update_seconds(stored, sizes, parts)
                        points += len(sizes)
                        least = min(least, float(peak.min()))
                        for at in np.flatnonzero(peak <= self.room):
                            point = Point(
                                stored,
                                tuple(map(int, sizes[at])),
                                Variant(int(parts[at]), remat),
                            )
                            row = _Candidate(point, float(work[at]), float(peak[at]), len(found))
                            found.append(row)
        return found, points, least

    def _counts(self) -> Iterator[tuple[int, ...]]:
        """Yields the numbers of microbatches that one program stands for."""
        counts = self.step.microbatches
        if 1 in counts:
            yield (1,)
        if more := tuple(count for count in counts if count > 1):
            yield more

    def _structures(self, facts: Facts) -> Iterator[Structure]:
        roles = roles_of(facts)
        if facts.microbatches == 1:  # stages need microbatches
            roles = tuple(role for role in roles if role.kind != "stack")
        if isinstance(self.devices, Mesh):
            yield from structures_on(self.devices, roles, self.pinned)
        else:
            yield from structures(facts, roles)

    def _sizes(self, structure: Structure, facts: Facts) -> list[tuple[int, ...]]:
        if isinstance(self.devices, Mesh):
            return [tuple(self.devices.sizes[axis] for axis in structure.axes)]
        most = [largest(role, facts) for role in structure.roles]
        return list(factorisations(self.devices, len(most), most))

    def _allowed(
        self, structure: Structure, facts: Facts, sizes: np.ndarray, parts: np.ndarray
    ) -> np.ndarray:
        """Returns which points make sense: no empty shards, and enough microbatches for stages."""
        allowed = np.ones(len(sizes), bool)
        for number, role in enumerate(structure.roles):
            if role.kind == "data":
                batch = max(row.dims.get(role.splits[0], 1) for row in facts.inputs)
                extent = np.prod(
                    [sizes[:, i] for i, r in enumerate(structure.roles) if r.kind == "data"], axis=0
                )
                allowed &= batch // parts >= extent
            if role.kind == "stack":
                allowed &= parts >= sizes[:, number]
        return allowed

    def bounds(self, variant: Variant) -> Bounds:
        """Returns the bounds of the program that stands for a variant."""
        key = Variant(min(variant.microbatches, PARTS), variant.remat)
        if key not in self._bounds:
            graph = self._graph(key)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                program = lower(graph, ONE_DEVICE, Layout(), None, self.step.donated(graph))
            self._bounds[key] = Bounds(Facts.of(program, self.hardware))
        return self._bounds[key]

    def _graph(self, variant: Variant) -> Graph:
        if variant not in self._graphs:
            self._graphs[variant] = self.step.graph(variant)
        return self._graphs[variant]

    def _sent(self, point: Point) -> float:
        """Returns an estimate of the waits of a point, by the first way to compute again."""
        variant = Variant(min(max(self.step.microbatches), PARTS), self.step.remats[0])
        if variant not in self._traffic:
            facts = self.bounds(variant).facts

            def alone(structure: Structure) -> SpmdProgram | None:
                single = Point(structure, (ALONE,), variant)
                return self._lower(single, Options())

            self._traffic[variant] = Traffic(facts, self.hardware, alone)
        return self._traffic[variant].seconds(point)

    @property
    def _quick(self) -> Options:
        return replace(self.step.options, hardware=None)

    @property
    def exact(self) -> Options:
        """The options with which time decides about programs."""
        return replace(self.step.options, hardware=self.name)

    def _lower(self, point: Point, options: Options) -> SpmdProgram | None:
        """Returns the program of a point; None if its layout does not fit the program."""
        graph = self._graph(point.variant)
        mesh = self.devices if isinstance(self.devices, Mesh) else point.mesh
        if not set(point.structure.axes) <= set(mesh.names) or devices_of(point.sizes) == ALONE:
            mesh = point.mesh
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return lower(graph, mesh, point.layout, options, self.step.donated(graph))
        except ValueError as error:
            self.reason = error
            return None


def _errors(
    rows: Sequence[_Candidate], tried: Mapping[int, Plan]
) -> tuple[dict[tuple[Role, ...], float], dict[tuple[Structure, str], float]]:
    """Returns how far time and memory were from their estimates, by what points have in common."""
    time: dict[tuple[Role, ...], float] = {}
    memory: dict[tuple[Structure, str], float] = {}
    for at, plan in tried.items():
        row, structure = rows[at], plan.point.structure
        key = structure, plan.point.variant.remat
        factor = plan.seconds / row.estimate
        time[structure.roles] = min(factor, time.get(structure.roles, factor))
        factor = plan.peak_bytes / row.peak
        memory[key] = min(factor, memory.get(key, factor))
    return time, memory
