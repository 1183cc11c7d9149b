"""Decisions: in words, what lowering decided by simulated time, and what the other way costs."""

from __future__ import annotations

from meshdsl.lowering.costs.units import show_bytes, show_seconds
from meshdsl.lowering.program import Decision


def in_words(decision: Decision) -> str:
    """Returns a decision as a note of a report.

    For example `halves=batch: 63.2 ms per step by simulation; none: 70.1 ms`.
    """
    chosen, other = decision.chosen, decision.other
    text = (
        f"{decision.name}: {chosen.name}, {show_seconds(chosen.seconds)} per step by simulation; "
        f"{other.name}: {show_seconds(other.seconds)}"
    )
    if not decision.fits:
        text += f" and {show_bytes(other.peak_bytes)}, which leaves too little memory"
    return text
