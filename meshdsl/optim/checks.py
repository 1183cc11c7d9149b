"""Checks of hyperparameters: numbers in intervals, with all problems in one error."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from typing import Any

RATE = "[0, inf)"  # the interval of learning rates


def out_of_range(within: Mapping[str, tuple[Any, str]]) -> list[str]:
    """Returns one text per value that is no number, not finite or outside of its interval.

    Args:
        within: `{"b1": (value, "[0, 1)")}`; bounds are read from the interval.
    """
    problems = []
    for name, (value, interval) in within.items():
        low, high = (float(bound) for bound in interval[1:-1].split(","))
        fits = False
        if is_number(value) and math.isfinite(value):
            above = value >= low if interval[0] == "[" else value > low
            below = value <= high if interval[-1] == "]" else value < high
            fits = above and below
        if not fits:
            problems.append(f"{name} must be in {interval}, got {value!r}")
    return problems


def check_ranges(name: str, within: Mapping[str, tuple[Any, str]], *more: str) -> None:
    """Checks hyperparameters; see `out_of_range`.

    Args:
        name: the owner of the hyperparameters, for the error.
        more: problems from other checks; empty texts do not count.

    Raises:
        ValueError: lists all values that do not fit, and the problems in `more`.
    """
    problems = [*out_of_range(within), *filter(None, more)]
    if problems:
        raise ValueError(f"{name}: {'; '.join(problems)}")


def bad_rate(value: Any, name: str = "learning_rate") -> str:
    """Returns the problem with a learning rate (a number or a schedule), or ""."""
    if callable(value):
        return ""
    (problem,) = out_of_range({name: (value, RATE)}) or [""]
    return problem.replace(f"in {RATE}", f"a number in {RATE} or a schedule")


def bad_mask(value: Any, name: str = "mask") -> str:
    """Returns the problem with a mask, or ""."""
    return "" if callable(value) else f"{name} must be a function of path and shape, got {value!r}"


def is_number(value: Any) -> bool:
    """Whether a value is a real number, and no bool."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def is_whole(value: Any) -> bool:
    """Whether a value is a whole number."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)
