"""Searching: the best points of a space, and a bound on all that was not lowered.

Each stage keeps fewer points than the one before, and looks at them more exactly:

1. `bounds` give the least time and memory of every point. Points that cannot fit are dropped.
2. Data parallelism is lowered first: it is often good, and points with a higher bound are looked
   at only where they show what less memory costs.
3. The points with the least time get an estimate of what they send (`traffic`).
4. The points with the least estimates are lowered as time most likely decides (`likely`).
5. The fastest of these are lowered as `explain` does: with what time decides.
6. If the best plan has to be near the best of the space, all points whose bounds are below it are
   lowered so, those of the least bounds first.

The search is deterministic: it counts points, not seconds, unless it has a limit of time.
"""

from __future__ import annotations

import math
import time
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

from meshdsl.layouts.calibration import find_hardware
from meshdsl.layouts.layout import Layout
from meshdsl.layouts.mesh import Mesh
from meshdsl.lowering.choices import Choice
from meshdsl.lowering.costs.simulation import Simulator, step_seconds
from meshdsl.lowering.costs.units import show_bytes
from meshdsl.lowering.decisions import ROOM, small_bytes, strays_from_bytes
from meshdsl.lowering.lower import lower
from meshdsl.lowering.options import Options
from meshdsl.lowering.pipelining.choosing import least_bubble
from meshdsl.lowering.program import SpmdProgram
from meshdsl.running.garbage import paused
from meshdsl.search.bounds import Bounds
from meshdsl.search.candidates import LIGHT, Candidate, Enumeration
from meshdsl.search.estimates import Errors, is_plain
from meshdsl.search.facts import ONE_DEVICE, Facts, stand_in
from meshdsl.search.likely import fastest_of, in_best_halves, likely_choices, sums_gradients
from meshdsl.search.pins import check_pins
from meshdsl.search.plans import DoesNotFit, Effort, Plan, Plans, Step
from meshdsl.search.space import (
    Point,
    Structure,
    Variant,
)
from meshdsl.search.traffic import ALONE, Traffic
from meshdsl.search.unsettled import Unsettled
from meshdsl.tracing.graph import Graph

_MIB = 2**20
_MOST_TIMES = 5.0  # small programs are tried in up to this multiple of the usual number
_QUICK = 0.5  # the scale of programs that are quickly simulated in halves
_LEAST_TRIED = 4
_SMALLER = 0.7  # a smaller plan has at most this share of the least memory before it
_SLOWER = 2.0  # a smaller plan takes at most this multiple of the least time, by its estimate
_ALIKE = 4  # the variants of a mesh and layout whose traffic is estimated
_HOPELESS = 1.25  # points are not tried if their estimates are this multiple of the least time
_SLOW = 1.15  # the same, if the error of these estimates is known; deciding gains less than this
_FASTEST = 8  # the plans that are kept of those that prove how good the best one is
_TIGHTER = 1.1  # about the factor of time if a program has to be made smaller


def search(
    step: Step,
    hardware: str,
    devices: int | Mesh,
    pinned: Layout | None = None,
    effort: Effort | None = None,
    slices: int = 1,
) -> Plans:
    """Returns the best plans for a step: `search(step, "v5p", 64).best.point.layout`.

    Args:
        hardware: a name, or the file of a calibration.
        devices: how many there are, or their mesh.
        pinned: rules that every layout has.
        slices: the number of slices that the devices are in; a slow network joins them.

    Raises:
        ValueError: no point of the space can be lowered; the message is the last reason.
        DoesNotFit: no point fits, by the bounds on memory.
    """
    return Search(step, hardware, devices, pinned, effort, slices).run()


class Search:
    """One search.

    Args:
        closed: whether the pinned rules are the complete layout, so that only the mesh, the
            microbatches and the remat are searched for. There is no certificate then: bounds do not
            hold for scoped rules of any kind.

    Attributes:
        room: the bytes that a device may use.
        reason: why the last point that could not be lowered has no program.
    """

    def __init__(
        self,
        step: Step,
        hardware: str,
        devices: int | Mesh,
        pinned: Layout | None = None,
        effort: Effort | None = None,
        slices: int = 1,
        closed: bool = False,
    ) -> None:
        self.closed = closed
        self.step, self.devices, self.slices = step, devices, slices
        self.pinned, self.effort = pinned or Layout(), effort or Effort()
        self.name, self.hardware = hardware, find_hardware(hardware)
        limit = step.options.memory
        usable = ROOM * self.hardware.memory_bytes // _MIB * _MIB
        self.room = usable if limit is None else float(limit)
        seconds = self.effort.seconds
        self.until = None if seconds is None else time.monotonic() + seconds
        self._graphs: dict[Variant, Graph] = {}
        self._bounds: dict[Variant, Bounds] = {}
        self._traffic: dict[Variant, Traffic] = {}
        self._tried: dict[int, Plan] = {}
        self._decisions: dict[int, Plan] = {}
        self._failed: set[int] = set()
        self._proven = 0
        self._stopped = False
        self.reason: ValueError | None = None

    def run(self) -> Plans:
        """Returns the plans; raises as `search`."""
        first = Variant(self.step.microbatches[0], self.step.remats[0])
        if self.pinned.rules:
            slices = 1 if self.closed else self.slices
            check_pins(
                self.pinned,
                self.devices,
                slices,
                self._graph(first),
                lambda: self.bounds(first).facts,
            )
        candidates, points, least = self.candidates()
        cut_short = self._stopped  # then there are points without bounds
        candidates.sort(key=lambda row: (row.bound, row.order))
        rows = [self.estimated(row) for row in self._plain_ones(candidates)]
        self._begin(rows)
        known = {row.order for row in rows}
        for row in self._worthwhile(self._first(candidates)):
            if row.order not in known and not (rows and self.is_late()):
                rows.append(self.estimated(row))
        self._try(rows)
        if not self._tried:
            raise self._nothing(points, least)
        self._decide()
        self._try_smaller(rows)
        unsettled = self._unsettled(candidates, rows)
        proven = [] if cut_short else self._prove(unsettled, rows)
        rows_of = sorted({**self._tried, **self._decisions}.items())
        # Sorting keeps the order of equal ones.
        ordered = sorted([*(plan for _, plan in rows_of), *proven], key=lambda plan: plan.seconds)
        plans = [plan for plan in ordered if plan.fits]
        tight = [plan for plan in ordered if not plan.fits]
        nearest = None if self.closed or cut_short else unsettled.first()
        return Plans(
            self.hardware,
            tuple(plans),
            tuple(sorted(tight, key=lambda plan: plan.peak_bytes)),
            None if nearest is None else nearest.bound,
            points,
            len(candidates),
            len(self._tried) + self._proven,
            least,
            self.room,
            not self._stopped,
            proven=not (self.closed or cut_short),
        )

    def _unsettled(self, candidates: Sequence[Candidate], rows: Sequence[Candidate]) -> Unsettled:
        """Returns the candidates that time has not decided about."""
        return Unsettled(
            candidates,
            lambda row: self.bounds(row.point.variant).least(row.point, row.bound),
            {row.order: row.bound for row in rows},
            {rows[at].order for at, plan in self._decisions.items() if plan.decided},
        )

    def _prove(self, unsettled: Unsettled, rows: Sequence[Candidate]) -> list[Plan]:
        """Decides about candidates of the least bounds, until the best plan is near all others.

        Where no plan fits yet, there is nothing to prove.

        Returns:
            The best plans of points that were not tried before: the fastest, and those that need
            less memory than faster ones.
        """
        plans: list[Plan] = []
        within, fastest = self.effort.within, self._fastest
        if within is None or self.closed or fastest == math.inf:
            return plans
        tried = {rows[at].order: at for at in self._tried}
        while (row := unsettled.first()) is not None and (1 + within) * row.bound < fastest:
            if self.is_late():
                break
            left = unsettled.below(fastest / (1 + within))
            self.effort.on_progress(fastest / row.bound - 1, left)
            plan = self._exactly(row.point, row.bound)
            unsettled.settle(row)
            if row.order not in tried:
                self._proven += 1
            if plan is None:
                continue
            fastest = min(fastest, plan.seconds if plan.fits else math.inf)
            if row.order in tried:
                self._decisions[tried[row.order]] = plan
            elif plan.fits:
                plans = _worth_keeping([*plans, plan])
        return plans

    def _plain_ones(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """Returns a few candidates of data parallelism with each way to store the state.

        They have the least bounds. Users compare with them.
        """
        count: Counter[Structure] = Counter()
        plain = []
        for row in candidates:
            if is_plain(row.point) and count[row.point.structure] < _ALIKE:
                count[row.point.structure] += 1
                plain.append(row)
        return plain

    def _begin(self, rows: Sequence[Candidate]) -> None:
        """Lowers data parallelism: points with higher bounds than its time are not looked at."""
        limit = self._most_tried // 2
        for at in self._plain(rows)[:limit]:
            if rows[at].bound < self._fastest and not (self._tried and self.is_late()):
                self._lowered(rows, at)

    def _first(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """Returns the candidates to estimate, a few of each mesh and layout.

        These are the candidates with the least bounds, and those with the least memory.
        """
        chosen: dict[int, Candidate] = {}
        alike: Counter[tuple] = Counter()
        # Each remat has a share of the estimates. Otherwise those that recompute nothing take all:
        # they have the least time, and seem to fit, since bounds on memory are low.
        of_remat: Counter[str] = Counter()
        most = -(-self.effort.estimated // len(self.step.remats))
        for row in candidates:
            key = row.point.structure, row.point.sizes
            remat = row.point.variant.remat
            if of_remat[remat] < most and alike[*key, remat] < _ALIKE:
                alike[*key, remat] += 1
                of_remat[remat] += 1
                chosen[row.order] = row
        smallest: set[tuple] = set()
        for row in sorted(candidates, key=lambda row: (row.peak, row.order)):
            key = row.point.structure, row.point.sizes
            if len(smallest) < self.effort.estimated // 4 and key not in smallest:
                smallest.add(key)
                chosen[row.order] = row
        return list(chosen.values())

    def _worthwhile(self, candidates: Sequence[Candidate]) -> Sequence[Candidate]:
        """Returns the candidates that may be the best plan, or one that needs less memory.

        The latter may be slower. They are lowered after the search for the best plan.
        """
        if self.closed:
            return candidates
        fastest, smaller = self._fastest, 0.0
        if self.effort.smaller:
            smaller = _SMALLER * min((p.peak_bytes for p in self._tried.values()), default=0.0)
        return [
            row
            for row in candidates
            if row.bound < fastest or (row.bound < _SLOWER * fastest and row.peak < smaller)
        ]

    def estimated(self, row: Candidate) -> Candidate:
        """Returns a candidate with its complete bound, and an estimate of its time."""
        bound = self.bounds(row.point.variant).least(row.point, row.bound)
        # The estimate of all that is sent has what the complete bound adds.
        estimate = max(bound, row.bound - row.waits + self._sent(row.point))
        return replace(row, bound=bound, estimate=estimate)

    @property
    def _most_tried(self) -> int:
        return max(_LEAST_TRIED, round(self.effort.tried * self._scale))

    @property
    def _fastest(self) -> float:
        """The time of the fastest plan that fits."""
        plans = (*self._tried.values(), *self._decisions.values())
        return min((plan.seconds for plan in plans if plan.fits), default=float("inf"))

    def _try(self, rows: Sequence[Candidate]) -> None:
        """Lowers the most promising rows, by their estimates and the errors of earlier estimates.

        If none of these fits, up to as many others are lowered, by the least memory.
        """
        limit = len(rows) if self.effort.only_time else self._most_tried
        for _ in range(2 * limit):
            fits = any(plan.fits for plan in self._tried.values())
            if len(self._tried) >= limit and fits:
                return
            best_at = self._promising(rows, by_memory=len(self._tried) >= limit)
            if best_at is None or (self._tried and self.is_late()):
                return
            self._lowered(rows, best_at)

    def _plain(self, rows: Sequence[Candidate]) -> list[int]:
        """Returns a row for each way to store the state and each remat, by ascending estimates.

        It is the one with the least estimate of those that may fit.
        """
        errors, best = Errors(rows, {}), dict[tuple[Structure, str], tuple[bool, float, int]]()
        for at, row in enumerate(rows):
            key = row.point.structure, row.point.variant.remat
            rank = errors.peak(row) > self.room, row.estimate, at
            best[key] = min(best.get(key, rank), rank)
        return [at for _, _, at in sorted(best.values())]

    def _promising(self, rows: Sequence[Candidate], by_memory: bool) -> int | None:
        """Returns the row to lower next; None if none of the others can be better.

        Estimates of one structure err alike, so each is scaled by the error of those tried.
        """
        errors, fastest = Errors(rows, self._tried), self._fastest
        best, least = None, float("inf")
        enough_tried = len(self._tried) >= _LEAST_TRIED and not self.effort.only_time
        for at, row in enumerate(rows):
            if at in self._tried or at in self._failed or row.bound >= fastest:
                continue
            peak = errors.peak(row)
            predicted = errors.seconds(row)
            if by_memory:
                predicted = peak
            elif peak > self.room:
                predicted *= _TIGHTER * min(peak / self.room, 2.0)
            hopeless = fastest * (_SLOW if errors.knows(row) else _HOPELESS)
            if predicted < least and (by_memory or not enough_tried or predicted < hopeless):
                best, least = at, predicted
        return best

    def _lowered(self, rows: Sequence[Candidate], at: int) -> None:
        """Lowers a row as time most likely decides, without deciding about it."""
        point, program, tries = rows[at].point, None, 0
        for choice in likely_choices(point, self.step.options, self._reduces_each(rows[at])):
            program = self._lower(point, self._direct(point), choice=choice) or program
            if program is None:
                self._failed.add(at)
                return
            tries += 1
            if program.peak_bytes <= self.room:
                break
        assert program is not None
        simulator = Simulator(self.hardware)
        seconds, fits = simulator.seconds(program), program.peak_bytes <= self.room
        if fits and strays_from_bytes(program, self.hardware, seconds, self._fastest):
            other = self._lower(point, self._direct(point), choice=replace(choice, timed=True))
            program, seconds = fastest_of([program, other], simulator, self.room)
        halves = self._scale >= _QUICK and self.step.options.halves == "auto"
        if fits and halves and seconds < _SLOW * self._fastest:
            program, seconds = in_best_halves(program, simulator, self.room)
        limited = tries > 1 or choice.reduce_each
        memory = int(self.room) if limited and self.step.options.memory is None else None
        self._tried[at] = Plan(point, program, seconds, rows[at].bound, memory=memory, fits=fits)

    def _reduces_each(self, row: Candidate) -> bool:
        """Whether a point surely does not fit with complete gradients beside all the rest."""
        if not sums_gradients(row.point):
            return False
        gradients = self.bounds(row.point.variant).gradient_bytes(row.point)
        return gradients + row.peak > self.room

    def _decide(self) -> None:
        """Decides about the best plans.

        At least one of them fits, if any plan does. A search with a limit of time decides about all
        plans that may be the best.
        """
        tried = self._tried

        def order(at: int) -> tuple[float, int]:
            return tried[at].seconds * (1 if tried[at].fits else _TIGHTER), at

        limit = max(1, int(self.effort.decided * self._scale))
        if self.effort.only_time:
            limit = len(tried)
        count = 0
        for at in sorted(tried, key=order):
            if self._decisions and self.is_late():
                return
            fitting = [plan for plan in self._decisions.values() if plan.fits]
            if count >= limit and (fitting or not tried[at].fits):
                continue
            count += 1
            if at in self._decisions or (fitting and tried[at].bound >= self._fastest):
                continue
            self._decide_about(at)
        plain = [at for at, plan in tried.items() if plan.fits and is_plain(plan.point)]
        near = [at for at in plain if tried[at].seconds < _HOPELESS * self._fastest]
        if near and (first := min(near, key=order)) not in self._decisions and not self.is_late():
            self._decide_about(first)

    def _decide_about(self, at: int) -> None:
        self._decisions[at] = self._decided(self._tried[at])

    def _decided(self, plan: Plan) -> Plan:
        """Returns a plan with the program that time decides on, within the memory if it can be."""
        limited = not plan.fits or plan.memory is not None
        return self._exactly(plan.point, plan.bound, limited) or plan

    def _exactly(self, point: Point, bound: float, limited: bool = False) -> Plan | None:
        """Returns the plan of a point that time decides on; None if the point has no program.

        Args:
            limited: whether it surely does not fit without a limit of memory.
        """
        options = self.exact
        if limited:
            options = replace(options, memory=int(self.room))
        program = self._lower(point, options)
        if program is None:
            return None
        if program.peak_bytes > self.room and options.memory is None:
            options = replace(options, memory=int(self.room))
            program = self._lower(point, options) or program
        seconds = step_seconds(program, self.hardware)
        limit = None if self.step.options.memory is not None else options.memory
        fits = program.peak_bytes <= self.room
        return Plan(point, program, seconds, bound, decided=True, memory=limit, fits=fits)

    def _try_smaller(self, rows: Sequence[Candidate]) -> None:
        """Lowers the fastest of the rows that need less memory than all plans; repeats it."""
        for _ in range(math.ceil(self.effort.smaller * min(1.0, self._scale))):
            errors = Errors(rows, self._tried)
            least = min(plan.peak_bytes for plan in self._tried.values())
            fastest = min(plan.seconds for plan in self._tried.values())
            smaller = [
                (errors.seconds(row), at)
                for at, row in enumerate(rows)
                if at not in self._tried and at not in self._failed
                if errors.peak(row) < _SMALLER * min(least, self.room)
                if errors.seconds(row) < _SLOWER * fastest
            ]
            if not smaller or self.is_late():
                return
            self._lowered(rows, min(smaller)[1])

    def is_late(self) -> bool:
        """Whether the time of the search is over, or the user has stopped it."""
        over = self.until is not None and time.monotonic() > self.until
        self._stopped = self._stopped or over or self.effort.stopped()
        return self._stopped

    @cached_property
    def _scale(self) -> float:
        """The number of programs to lower, in multiples of the usual: small programs are quick."""
        bounds = next(iter(self._bounds.values()))
        return min(_MOST_TIMES, LIGHT / max(1, bounds.facts.instructions))

    def _nothing(self, points: int, least: float) -> ValueError:
        if self.reason is not None:
            return self.reason
        where = self.devices if isinstance(self.devices, Mesh) else f"{self.devices:,} devices"
        if not points and self.closed:
            slices = f", one goes across the {self.slices:,} slices" if self.slices > 1 else ""
            return ValueError(
                f"layout {self.pinned} does not fit {where}: each axis has at least 2 devices"
                f"{slices}, each device has a part of the batch, and a pipeline has as many "
                "microbatches as stages; give another layout, or auto"
            )
        if not points:
            return ValueError(
                f"no layout found: nothing of this program can be split over {where}; give a "
                "layout, or fewer devices"
            )
        return DoesNotFit(
            f"no layout fits: each of {points:,} needs more than {show_bytes(self.room)} of a "
            f"device, the smallest at least {show_bytes(least)}; take more devices, a smaller "
            "batch, or another limit (--memory, Options(memory=))"
        )

    def candidates(self) -> tuple[list[Candidate], int, float]:
        """Returns the points that may fit, the number of points, and the least of all peaks."""
        return Enumeration(
            self.step,
            self.devices,
            self.slices,
            self.pinned,
            self.closed,
            self.room,
            self.bounds,
            self.is_late,
        ).run()

    def bounds(self, variant: Variant) -> Bounds:
        """Returns the bounds of the program that stands for a variant."""
        key = Variant(stand_in(variant.microbatches), variant.remat)
        if key not in self._bounds:
            graph = self._graph(key)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                program = lower(graph, ONE_DEVICE, Layout(), None, self.step.donated(graph))
            facts = Facts.of(program, self.hardware)
            self._bounds[key] = Bounds(replace(facts, bubble=least_bubble(self.step.options)))
        return self._bounds[key]

    def _graph(self, variant: Variant) -> Graph:
        if variant not in self._graphs:
            self._graphs[variant] = self.step.graph(variant)
        return self._graphs[variant]

    def _sent(self, point: Point) -> float:
        """Returns an estimate of the waits of a point; the first remat stands for all."""
        variant = Variant(stand_in(max(self.step.microbatches)), self.step.remats[0])
        if variant not in self._traffic:
            facts = self.bounds(variant).facts

            def alone(structure: Structure) -> SpmdProgram | None:
                single = Point(structure, (ALONE,), variant)
                return self._lower(single, Options(), single.mesh)

            stored = facts.instructions <= 2 * LIGHT
            self._traffic[variant] = Traffic(facts, self.hardware, alone, stored)
        return self._traffic[variant].seconds(point)

    @property
    def quick(self) -> Options:
        """The options with which nothing is decided by time."""
        return replace(self.step.options, hardware=None)

    @property
    def exact(self) -> Options:
        """The options with which time decides about programs."""
        return replace(self.step.options, hardware=self.name)

    def _direct(self, point: Point) -> Options:
        """Returns options with which a choice needs no further decisions."""
        if not any(role.kind == "stack" for role in point.structure.roles):
            return self.exact
        # With hardware, time chooses the schedule of a pipeline.
        if self.step.options.bucket_bytes is not None:
            return self.quick
        mesh = self.devices if isinstance(self.devices, Mesh) else point.mesh
        return replace(self.quick, bucket_bytes=small_bytes(self.hardware, mesh))

    def _lower(
        self,
        point: Point,
        options: Options,
        mesh: Mesh | None = None,
        choice: Choice | None = None,
    ) -> SpmdProgram | None:
        """Returns the program of a point; None if its layout does not fit the program."""
        if mesh is None:
            mesh = self.devices if isinstance(self.devices, Mesh) else point.mesh
        try:
            return self.program(mesh, point.layout, point.variant, options, choice)
        except ValueError as error:
            self.reason = error
            return None

    def program(
        self,
        mesh: Mesh,
        layout: Layout,
        variant: Variant,
        options: Options | None = None,
        choice: Choice | None = None,
    ) -> SpmdProgram:
        """Returns the program of any mesh and layout; raises ValueError if it does not fit them."""
        graph = self._graph(variant)
        with warnings.catch_warnings(), paused():
            warnings.simplefilter("ignore")
            donated = self.step.donated(graph)
            return lower(graph, mesh, layout, options or self.exact, donated, choice=choice)


def _worth_keeping(plans: Sequence[Plan]) -> list[Plan]:
    """Returns the fastest plans, and those that need less memory than all faster ones."""
    kept: list[Plan] = []
    least = math.inf
    for plan in sorted(plans, key=lambda plan: plan.seconds):
        if len(kept) < _FASTEST or plan.peak_bytes < least:
            kept.append(plan)
            least = min(least, plan.peak_bytes)
    return kept
