"""Plans: what a search is given, and what it finds."""

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
            those lowered with what time decides. Of a large program, without loops over its layers,
            fewer are tried; of a small one, more.
        smaller: those lowered to show what less memory costs.
        seconds: the time after which no further point is lowered. Until then, all are lowered that
            may be best. None: the search counts points, not seconds.
        stopped: whether the user wants no further point.
    """

    estimated: int = 200
    tried: int = 12
    decided: int = 2
    smaller: int = 0
    seconds: float | None = None
    stopped: Callable[[], bool] = lambda: False


@dataclass(frozen=True)
class Plan:
    """A point that was lowered.

    Attributes:
        program: what one device does.
        seconds: the simulated time of a step.
        bound: the least time of this point by arithmetic alone.
        decided: whether time has decided about the program, as in `explain` on known hardware.
        memory: the limit of memory with which the program was lowered, if it needs one to fit.
        fits: whether the devices have room for it.
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
    """What a search has found.

    Attributes:
        plans: those that fit, the fastest first.
        tight: those that do not, the one that needs the least memory first.
        bound: the least time of every point that was not lowered with what time decides; None: all
            of them were, or the layout was given.
        points: how many there are; `fitting`: how many of them may fit, by their bounds.
        least_bytes: the least memory of a point, by its bound.
        room: the bytes that a device may use.
        complete: whether the search came to its end, before its time was over.
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

    @property
    def best(self) -> Plan:
        """The fastest plan that fits; raises DoesNotFit if none does."""
        if not self.plans:
            nearest = self.tight[0]
            raise DoesNotFit(
                f"no layout fits: of {self.points:,}, the nearest that was found needs "
                f"{show_bytes(nearest.peak_bytes)} of the {show_bytes(self.room)} that a device "
                f"may use: mesh {nearest.program.mesh}, layout {nearest.point.layout}"
            )
        return self.plans[0]

    @property
    def front(self) -> list[Plan]:
        """The plans of which no other one is both faster and smaller, the fastest first."""
        front: list[Plan] = []
        for plan in self.plans:
            if not front or plan.peak_bytes < front[-1].peak_bytes:
                front.append(plan)
        return front

    @property
    def gap(self) -> float:
        """By how much the best plan may be slower than the best of the space, at most."""
        if self.bound is None or self.bound >= self.best.seconds:
            return 0.0
        return self.best.seconds / self.bound - 1
