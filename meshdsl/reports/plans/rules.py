"""Rules: what a step costs without a rule of its layout."""

from __future__ import annotations

from dataclasses import dataclass

from meshdsl.layouts.layout import Rule
from meshdsl.lowering.costs.units import show_bytes, show_seconds


@dataclass(frozen=True)
class Without:
    """A step without one rule.

    Attributes:
        seconds, peak_bytes: its figures; 0 if it cannot be lowered, for the reason in `problem`.
        fits: whether the devices have room for it.
    """

    rule: Rule
    seconds: float
    peak_bytes: int
    fits: bool
    problem: str = ""

    def change(self, seconds: float, peak_bytes: int) -> tuple[str, str]:
        """Returns how much time and memory the step needs without it, against with it."""
        if self.problem:
            return self.problem, ""
        time = _signed(self.seconds - seconds, show_seconds, 0.001 * seconds)
        memory = _signed(self.peak_bytes - peak_bytes, show_bytes, 0.001 * peak_bytes)
        return time, memory if self.fits else f"{memory}: does not fit"


def _signed(change: float, show: object, least: float) -> str:
    assert callable(show)
    if abs(change) <= least:
        return "same"
    return ("+" if change > 0 else "-") + show(abs(change))
