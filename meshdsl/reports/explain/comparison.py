"""Comparison: one program under two layouts, and what changes between them.

A collective is the same in both if it is of one kind, of the same dims, over the same axes, in the
same phase and from the same source line; it changes where its count or its bytes do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from meshdsl.late import late
from meshdsl.layouts.layout import Layout
from meshdsl.layouts.mesh import Mesh
from meshdsl.lowering.costs.units import show_bytes, show_flops, show_seconds, show_share
from meshdsl.lowering.program import Value
from meshdsl.reports.explain.explanation import PARTS, PHASES, Explanation, Traffic


@dataclass(frozen=True, slots=True)
class Total:
    """One figure under both layouts.

    Attributes:
        show: formats the figure.
    """

    name: str
    before: float
    after: float
    show: Callable[[float], str]

    @property
    def change(self) -> str:
        """The change in percent, `-14 %`; `same`; or what appeared or went."""
        if self.before == self.after:
            return "same"
        if not self.before:
            return f"+{self.show(self.after)}"
        percent = 100 * (self.after / self.before - 1)
        if abs(percent) < 0.01:
            return show_share(abs(percent) / 100)
        return f"{percent:+.0f} %" if abs(percent) >= 1 else f"{percent:+.1g} %"


@dataclass(frozen=True, slots=True)
class Moved:
    """One collective under both layouts; None where it is not there."""

    before: Traffic | None
    after: Traffic | None

    @property
    def any(self) -> Traffic:
        """The collective under a layout that has it, the second if both do."""
        traffic = self.after or self.before
        assert traffic is not None
        return traffic

    @property
    def what(self) -> str:
        """`added`, `removed`, or `changed`."""
        if self.before is None:
            return "added"
        return "removed" if self.after is None else "changed"

    @property
    def more_bytes(self) -> float:
        """How many more wire bytes the second layout has."""
        return (self.after.wire_bytes if self.after else 0.0) - (
            self.before.wire_bytes if self.before else 0.0
        )


@dataclass(frozen=True)
class Comparison:
    """Two layouts of one program; `str()` tells what changes.

    Attributes:
        totals: the main figures; `parts` the memory at the peak, by what it is for.
        traffic: the collectives that change, those that change most first.
        same: how many rows of collectives do not change.
        parameters: those with another tensor layout: path, and the value under each layout.
    """

    before: Explanation
    after: Explanation
    totals: tuple[Total, ...]
    parts: tuple[Total, ...]
    traffic: tuple[Moved, ...]
    same: int
    parameters: tuple[tuple[str, Value, Value], ...]

    @property
    def name(self) -> str:
        """The program's name."""
        return self.before.name

    @property
    def mesh(self) -> Mesh:
        """The mesh of the first layout."""
        return self.before.mesh

    @property
    def layouts(self) -> tuple[Layout, Layout]:
        """Both layouts."""
        return self.before.layout, self.after.layout

    def __str__(self) -> str:
        return late("comparison as text")(self)

    def html(self) -> str:
        """Returns both reports and what changes as one HTML page that needs nothing else."""
        return late("report as page")(self)

    def _repr_html_(self) -> str:
        """Returns both reports and what changes for notebooks."""
        return late("report as fragment")(self)


def compare(before: Explanation, after: Explanation) -> Comparison:
    """Compares two layouts of one program.

        print(compare(explain(f.lower(x)), explain(g.lower(x))))

    Args:
        before: the program under the first layout.
        after: under the second.
    """
    moved = _moved(before, after)
    changes = [one for one in moved if not _alike(one)]
    lies = {one.path: one.value for one in after.parameters}
    return Comparison(
        before,
        after,
        totals=tuple(_totals(before, after)),
        parts=tuple(
            Total(part, before.bytes_of[part], after.bytes_of[part], show_bytes) for part in PARTS
        ),
        traffic=tuple(
            sorted(changes, key=lambda m: (-abs(m.more_bytes), PHASES.index(m.any.phase)))
        ),
        same=len(moved) - len(changes),
        parameters=tuple(
            (one.path, one.value, lies[one.path])
            for one in before.parameters
            if one.path in lies and lies[one.path].layout != one.value.layout
        ),
    )


def _totals(before: Explanation, after: Explanation) -> list[Total]:
    def total(
        name: str, figure: Callable[[Explanation], float], show: Callable[[float], str]
    ) -> Total:
        return Total(name, figure(before), figure(after), show)

    totals = [
        total("step by simulation", lambda e: e.simulated.seconds, show_seconds),
        total("step at the peaks", lambda e: e.timeline.seconds, show_seconds),
        total("if sending overlaps", lambda e: e.timeline.overlapped_seconds, show_seconds),
        total("on the wire", lambda e: e.wire_bytes, show_bytes),
        total("collectives", lambda e: e.collectives, lambda n: f"{n:,.0f}"),
        total("arithmetic", lambda e: e.flops, show_flops),
        total("peak memory", lambda e: e.memory.peak_bytes, show_bytes),
    ]
    if before.pads.peak_bytes or after.pads.peak_bytes:
        totals.append(total("pads at the peak", lambda e: e.pads.peak_bytes, show_bytes))
    return totals


def _moved(before: Explanation, after: Explanation) -> list[Moved]:
    first, second = _by_line(before), _by_line(after)
    keys = dict.fromkeys([*first, *second])
    return [Moved(first.get(key), second.get(key)) for key in keys]


def _by_line(explanation: Explanation) -> Mapping[tuple[object, ...], Traffic]:
    return {(t.kind, t.source, t.axes, t.dims, t.phase): t for t in explanation.traffic}


def _alike(one: Moved) -> bool:
    return (
        one.before is not None
        and one.after is not None
        and one.before.count == one.after.count
        and one.before.payload_bytes == one.after.payload_bytes
        and one.before.wire_bytes == one.after.wire_bytes
    )
