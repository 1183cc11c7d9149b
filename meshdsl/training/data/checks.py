"""Checks of numbers, and lists of problems for error messages."""

from __future__ import annotations


def check_at_least(least: int, **numbers: int) -> None:
    """Checks that numbers are not too small.

    Raises:
        ValueError: a number is too small; the first one is named.
    """
    for name, number in numbers.items():
        if number < least:
            raise ValueError(f"{name} must be at least {least}, got {number}")


def numbered(title: str, problems: list[str], most: int = 10) -> str:
    """Returns a title with the count of problems, and the first of them, one line each."""
    count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
    lines = [f"  {number}. {text}" for number, text in enumerate(problems[:most], start=1)]
    if len(problems) > most:
        lines.append(f"  ... and {len(problems) - most} more")
    return "\n".join([f"{title} ({count})", "", *lines])
