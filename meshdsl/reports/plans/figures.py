"""Figures: what one plan costs, in parts that can be compared with those of another one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from meshdsl.layouts.hardware import Hardware
from meshdsl.lowering.costs.simulation import simulate
from meshdsl.lowering.costs.units import show_bytes, show_seconds
from meshdsl.reports.explain import Explanation, explain
from meshdsl.reports.explain.limits import in_half_precision, limit_of, waits_of
from meshdsl.search.plans import Plan
from meshdsl.tensors.dtypes import BFLOAT16

_MATTERS = 0.02  # the share of a step from which a difference is told


@dataclass(frozen=True)
class Heading:
    """What was searched.

    Attributes:
        model, machine, batch: as reports call them.
        count: how many tokens, or examples, a step takes; `unit`: which of these.
        version: that of meshdsl.
    """

    model: str
    machine: str
    batch: str
    count: int
    unit: str
    version: str


@dataclass(frozen=True)
class Figures:
    """What a plan costs.

    Attributes:
        waits: seconds of waiting, by the kind of collective and its axes, the longest first.
        flags: the flags that say what else the plan does, as they are typed.
    """

    plan: Plan
    hardware: Hardware
    seconds: float
    work: float
    waits: Mapping[tuple[str, str], float]
    flags: str

    @property
    def exposed(self) -> float:
        return sum(self.waits.values())

    @cached_property
    def _explanation(self) -> Explanation:
        return explain(self.plan.program, self.hardware.name)

    @cached_property
    def memory(self) -> Mapping[str, int]:
        """The bytes of a device at the peak, by what they are for."""
        return {part: count for part, count in self._explanation.bytes_of.items() if count}

    @property
    def limit(self) -> str:
        """What takes most of the step."""
        return limit_of(self._explanation.simulated, self._explanation.timeline)

    @property
    def dtype(self) -> np.dtype | None:
        """That of the operands of most products; None: there are no products."""
        return self._explanation.dtype

    @property
    def faster(self) -> str:
        """What half precision does for the step, or an empty string."""
        return in_half_precision(self.plan.program, self._explanation.timeline)

    @property
    def flops_share(self) -> float:
        """The share of the bfloat16 peak that a device uses; recomputed products count too."""
        return self.plan.program.flops / self.seconds / self.hardware.peak(BFLOAT16)

    @property
    def peak_of(self) -> str:
        """The kind of products whose peak `flops_share` is of."""
        return "bf16" if BFLOAT16.itemsize in self.hardware.flops else "float32"

    def worse(self, than: Figures) -> str:
        """Returns what makes this plan worse than a better one, the most first."""
        least = _MATTERS * than.seconds
        parts = [(self.work - than.work, "work")]
        keys = dict.fromkeys([*self.waits, *than.waits])
        for kind, axes in keys:
            more = self.waits.get((kind, axes), 0.0) - than.waits.get((kind, axes), 0.0)
            parts.append((more, f"waits for {kind} over {axes}"))
        parts.sort(key=lambda row: (-row[0], row[1]))
        told = [f"+{show_seconds(more)} {what}" for more, what in parts[:2] if more > least]
        if not self.plan.fits:
            told.insert(0, f"does not fit: {show_bytes(self.plan.peak_bytes)}")
        elif not told and self.plan.peak_bytes > than.plan.peak_bytes:
            told.append(f"{show_bytes(self.plan.peak_bytes - than.plan.peak_bytes)} more memory")
        return "; ".join(told)


def figures(plan: Plan, hardware: Hardware, flags: str = "") -> Figures:
    """Returns what a plan costs."""
    schedule = simulate(plan.program, hardware)
    work = schedule.times.work
    return Figures(plan, hardware, schedule.seconds, work, waits_of(schedule), flags)
