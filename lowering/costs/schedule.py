"""Schedule: what one device does in a step, and when, as events; and the totals of their times.

An event is work, a collective, or a loop; the events of a loop's body are inside, once, with a
count. Work never waits for work, so the time of a step is that of its work and of its waiting for
collectives: what is *exposed*. Work that is done while a collective travels is *hidden* time of it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeVar

Key = TypeVar("Key", bound=Hashable)
WORK = "work"


@dataclass(frozen=True)
class Event:
    """One line of a schedule, or one run of a loop's body; the figures are of one execution.

    Attributes:
        kind: `work`, a kind of collective, or a loop or branch: `while` or `conditional` in a
            compiled program, `scan`, `while` or `cond` in a simulated one.
        name: the line's, as HLO calls it.
        scope: where it comes from, as JAX calls it; `source`: the file and line, if known.
        start: when it begins, in seconds after the computation that it stands in.
        seconds: what it takes: of work, of the links, or of all runs of a loop.
        exposed: how long the device waits for it: for a collective, or in all runs of a loop.
        hidden: how long the device works while a collective travels.
        axes: the mesh axes of a collective.
        wire_bytes: the bytes that a device sends.
        asynchronous: whether work may go on meanwhile.
        product: whether work has a product of matrices, or a collective runs beside one.
        spans_product: of a collective in a compiled program: whether a product of matrices stands
            between its start and its end, also if it has arrived before.
        count: how often a loop runs what is inside.
    """

    kind: str
    name: str
    scope: str
    source: str
    start: float
    seconds: float
    exposed: float = 0.0
    axes: tuple[str, ...] = ()
    wire_bytes: float = 0.0
    asynchronous: bool = False
    product: bool = False
    spans_product: bool = False
    count: int = 1
    inside: tuple[Event, ...] = ()
    hidden: float = 0.0


@dataclass(frozen=True)
class Schedule:
    """The time of one device, by the compiler's schedule or by a simulation.

    Attributes:
        unknown: how often work without cycles runs, by its scope.
        timed: whether the compiler gave cycles at all.
        origin: where the costs of its work come from, if not from the compiler that wrote it.
        estimated: the kinds of instructions that these costs lack, and what stands for each.
    """

    seconds: float
    events: tuple[Event, ...]
    unknown: Mapping[str, int]
    timed: bool
    origin: str = ""
    estimated: Mapping[str, str] = field(default_factory=dict)

    def walk(self) -> Iterator[tuple[Event, int]]:
        """Yields the events without loops, with how often they run in a step."""
        waiting = [(event, 1) for event in reversed(self.events)]
        while waiting:
            event, times = waiting.pop()
            if event.inside:
                waiting += [(one, times * event.count) for one in reversed(event.inside)]
            else:
                yield event, times

    @cached_property
    def collectives(self) -> list[tuple[Event, int]]:
        """The collectives, with how often they run in a step."""
        return [(event, times) for event, times in self.walk() if event.kind != WORK]

    def sends_of_loops(self, axes: Sequence[str]) -> list[tuple[Event, int]]:
        """Returns the permutes over some axes in loops, with how often they run in a step."""
        return [
            (event, loop.count)
            for loop in self.events
            for event in loop.inside
            if event.kind == "permute" and set(event.axes) == set(axes)
        ]

    @cached_property
    def times(self) -> Times:
        """The totals of a step."""
        return Times.of(self.walk())

    @cached_property
    def estimated_seconds(self) -> float:
        """Those of work, and of waits, whose costs are estimated."""
        found = ((event, times) for event, times in self.walk() if event.name in self.estimated)
        return sum((e.seconds if e.kind == WORK else e.exposed) * times for e, times in found)

    @cached_property
    def asynchronous_bytes(self) -> float:
        """Those of asynchronous collectives."""
        return sum(e.wire_bytes * times for e, times in self.collectives if e.asynchronous)

    @cached_property
    def bytes_beside_products(self) -> float:
        """Those of asynchronous collectives beside a product of matrices."""
        return sum(
            e.wire_bytes * times for e, times in self.collectives if e.asynchronous and e.product
        )

    def by(self, key: Callable[[Event], Key]) -> list[tuple[Key, Times]]:
        """Returns the totals of events that are alike in something, longest first.

        schedule.by(lambda event: event.source)
        """
        groups: dict[Key, list[tuple[Event, int]]] = {}
        for event, times in self.walk():
            groups.setdefault(key(event), []).append((event, times))
        totals = [(name, Times.of(events)) for name, events in groups.items()]
        return sorted(totals, key=lambda item: -item[1].work - item[1].exposed)


@dataclass(frozen=True)
class Times:
    """Seconds of work, of waiting for collectives, and of collectives beside work; bytes sent."""

    work: float
    exposed: float
    hidden: float
    wire_bytes: float

    @staticmethod
    def of(events: Iterable[tuple[Event, int]]) -> Times:
        """Returns the totals of some events, each with how often it runs."""
        work = exposed = hidden = wire_bytes = 0.0
        for event, times in events:
            if event.kind == WORK:
                work += event.seconds * times
            else:
                exposed += event.exposed * times
                hidden += event.hidden * times
                wire_bytes += event.wire_bytes * times
        return Times(work, exposed, hidden, wire_bytes)
