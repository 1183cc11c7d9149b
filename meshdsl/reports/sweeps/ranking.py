"""Ranking: which candidates come first, and which of them nothing beats in both bytes.

Candidates that fit come first, then those that do not fit, then those without figures. Within each
group the one with the least device-seconds comes first: on machines of one size the fastest. Equal
ones are ordered by bytes on the wire, then by memory, then by their texts, so that the order does
not depend on which was measured first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from meshdsl.reports.sweeps.result import Result


@dataclass(frozen=True)
class Ranked:
    """A result with its place, from 1, and whether it is on the Pareto front.

    A result that fits is on the front if no other one that fits needs less of memory or wire bytes
    and no more of the other.
    """

    rank: int
    front: bool
    result: Result


def ranked(results: Iterable[Result]) -> list[Ranked]:
    """Returns results in their order."""
    ordered = sorted(results, key=_order)
    fitting = [one for one in ordered if one.fits and not one.reason]
    points = [(float(one.peak_bytes or 0), one.wire) for one in fitting]
    marks = dict(zip((one.candidate for one in fitting), front(points), strict=True))
    return [
        Ranked(rank, marks.get(one.candidate, False), one) for rank, one in enumerate(ordered, 1)
    ]


def front(points: Sequence[tuple[float, float]]) -> list[bool]:
    """Returns for each point whether it is on the front.

    No other point is then smaller in one number and no larger in the other.

    >>> front([(1, 4), (2, 4), (3, 1), (3, 1)])
    [True, False, True, True]
    """
    least: dict[tuple[float, float], bool] = {}
    lowest = float("inf")
    for point in sorted(set(points)):
        least[point] = point[1] < lowest
        lowest = min(lowest, point[1])
    return [least[point] for point in points]


def _order(one: Result) -> tuple[bool, bool, float, float, int, str, str, str]:
    seconds = float("inf") if one.seconds is None else one.device_seconds
    peak = one.peak_bytes or 0
    texts = one.topology, one.mesh, one.layout
    return bool(one.reason), not one.fits, seconds, one.wire, peak, *texts
