"""Plans: the arguments of a search, and its results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from meshdsl.layouts.hardware import Hardware
from meshdsl.lowering.costs.units import show_bytes
from meshdsl.lowering.options import Options
from meshdsl.lowering.program import SpmdProgram
from meshdsl.search.space import Point, Variant
from meshdsl.tracing.graph import Graph


class DoesNotFit(ValueError):
    """No point of a space fits the devices."""


@dataclass(frozen=True)
class Step:
    """A function to plan, and the variants of it.

    Attributes:
        graph: traces a variant.
        donated: for each input of a graph, whether an output may be written over it.
        microbatches: the numbers of microbatches of the variants.
        remats: what the variants recompute; "": what the function itself does.
        options: the user's options.
    """

    graph: Callable[[Variant], Graph]
    donated: Callable[[Graph], Sequence[bool]]
    microbatches: tuple[int, ...] = (1,)
    remats: tuple[str, ...] = ("",)
    options: Options = field(default_factory=Options)


@dataclass(frozen=True)
class Effort:
    """How many points each stage of a search takes.

    Of large programs, without loops over their layers, fewer points are lowered than this says; of
    small ones, more.

    Attributes:
        estimated: points whose traffic is estimated.
        tried: points that are lowered without decisions.
        decided: points that are lowered with what time decides.
        smaller: points that are lowered to show what less memory costs.
        seconds: the time after which no further point is lowered. Until then, all points that may
            be the best are lowered, but see `within`. None: the search counts points, not seconds.
        stopped: whether the user has stopped the search.
        within: points are decided about until the best plan is surely within this share of the best
            of the space (0.01: 1 %). This comes after all stages. None: the search ends before.
        on_progress: is called before each of these points, with the share so far, and with the
            number of points that are left, or fewer once a faster plan is found.
    """

    estimated: int = 200
    tried: int = 12
    decided: int = 2
    smaller: int = 0
    seconds: float | None = None
    stopped: Callable[[], bool] = lambda: False
    within: float | None = None
    on_progress: Callable[[float, int], None] = lambda share, left: None

    @property
    def only_time(self) -> bool:
        """Whether only time limits the points of each stage."""
        return self.seconds is not None and self.within is None


@dataclass(frozen=True)
class Plan:
    """A point that was lowered.

    Attributes:
        program: its program, which every device runs.
        seconds: the simulated time of a step.
        bound: the least time of this point by arithmetic alone.
        decided: whether time has decided about the program, as in `explain` on known hardware.
        memory: the limit in bytes that the search set so that the program fits; None: it set none.
        fits: whether its peak is within the bytes that a device may use.
    """

    point: Point
    program: SpmdProgram
    seconds: float
    bound: float
    decided: bool = False
    memory: int | None = None
    fits: bool = True

    @property
    def peak_bytes(self) -> int:
        return self.program.peak_bytes


@dataclass(frozen=True)
class Plans:
    """The results of a search.

    Attributes:
        plans: the plans that fit, the fastest first (but see `simplified_from`).
        tight: the plans that do not fit, the one that needs the least memory first.
        bound: no point that was not lowered with what time decides is faster than this, in seconds.
            None: all points were lowered so, or it is not known.
        proven: whether a bound of None says that all points were lowered so. It does not where the
            layout was given, or the search was stopped before it knew all points.
        points: the number of points of the space.
        fitting: the number of points that may fit, by their bounds.
        lowered: the number of points that were lowered.
        least_bytes: the least memory of a point, by its bound.
        room: the bytes that a device may use.
        complete: whether neither a limit of time nor the user stopped the search early.
        simplified_from: the fastest plan, if a slower one with fewer rules stands before it.
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
    complete: bool = True
    simplified_from: Plan | None = None
    proven: bool = True

    @property
    def best(self) -> Plan:
        """The first plan that fits; raises DoesNotFit if none does."""
        if not self.plans:
            smallest = self.tight[0]
            none = "no layout fits" if self.complete else "stopped early: no layout so far fits"
            raise DoesNotFit(
                f"{none}: of {self.points:,}, the smallest that was lowered needs "
                f"{show_bytes(smallest.peak_bytes)} of the {show_bytes(self.room)} that a device "
                f"may use: mesh {smallest.program.mesh}, layout {smallest.point.layout}"
            )
        return self.plans[0]

    @property
    def front(self) -> list[Plan]:
        """The plans that are smaller than every faster plan, the fastest first."""
        front: list[Plan] = []
        for plan in sorted(self.plans, key=lambda plan: plan.seconds):
            if not front or plan.peak_bytes < front[-1].peak_bytes:
                front.append(plan)
        return front

    @property
    def gap(self) -> float | None:
        """The share by which the best plan is slower than the best of the space, at most.

        None: it is not known.
        """
        if self.bound is None:
            return 0.0 if self.proven else None
        if self.bound >= self.best.seconds:
            return 0.0
        return self.best.seconds / self.bound - 1
