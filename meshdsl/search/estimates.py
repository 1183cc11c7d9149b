"""Estimates: how far off those of a search are, by the programs that it has lowered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from meshdsl.search.candidates import Candidate
from meshdsl.search.plans import Plan
from meshdsl.search.roles import Role
from meshdsl.search.space import Point, Structure

_USUAL = 1.5  # memory against its bound, before any program is lowered


class Errors:
    """The errors of estimates: factors for points that have roles or a structure in common."""

    def __init__(self, rows: Sequence[Candidate], tried: Mapping[int, Plan]) -> None:
        self._time: dict[tuple[Role, ...], float] = {}
        self._memory: dict[tuple[Structure, str], float] = {}
        factors: dict[str, list[float]] = {}
        for at, plan in tried.items():
            row, structure = rows[at], plan.point.structure
            factor = plan.seconds / row.estimate if row.estimate else 1.0
            self._time[structure.roles] = min(factor, self._time.get(structure.roles, factor))
            factor = plan.peak_bytes / row.peak if row.peak else 1.0
            key = structure, plan.point.variant.remat
            self._memory[key] = min(factor, self._memory.get(key, factor))
            factors.setdefault(plan.point.variant.remat, []).append(factor)
        self._usual = {remat: float(np.median(each)) for remat, each in factors.items()}

    def knows(self, row: Candidate) -> bool:
        """Whether a point with the same roles was lowered."""
        return row.point.structure.roles in self._time

    def seconds(self, row: Candidate) -> float:
        return row.estimate * self._time.get(row.point.structure.roles, 1.0)

    def peak(self, row: Candidate) -> float:
        key = row.point.structure, row.point.variant.remat
        return row.peak * self._memory.get(key, self._usual.get(key[1], _USUAL))


def is_plain(point: Point) -> bool:
    """Whether it is data parallelism: every axis splits the batch, and nothing else."""
    return all(role.kind == "data" for role in point.structure.roles)
