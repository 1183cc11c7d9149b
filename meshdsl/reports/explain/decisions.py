"""Decisions: in words, what lowering decided by simulated time, and what the other way costs."""

from __future__ import annotations

from collections.abc import Iterable

from meshdsl.lowering.costs.units import show_bytes, show_seconds
from meshdsl.lowering.program import Decision


def notes_of(decisions: Iterable[Decision]) -> tuple[str, ...]:
    """Returns notes of the decisions, without those whose two ways show the same figures."""
    return tuple(in_words(one) for one in decisions if not _looks_equal(one))


def _looks_equal(decision: Decision) -> bool:
    times = {show_seconds(way.seconds) for way in (decision.chosen, decision.other)}
    return decision.fits and len(times) == 1


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
