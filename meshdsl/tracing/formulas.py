"""Formulas: operators with as few parentheses as they need, and numbers for reading."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

# How strongly operators bind. Sums keep their grouping: a right operand binds more strongly.
_LEVELS = {"<": 1, "<=": 1, ">": 1, ">=": 1, "==": 1, "!=": 1, "|": 2, "^": 3, "&": 4, "<<": 5}
_LEVELS |= {">>": 5, "+": 6, "-": 6, "*": 7, "/": 7, "//": 7, "%": 7, "**": 9}
_PREFIX = 8
ATOM = 10

Formula = tuple[str, int]  # a text and how strongly its outermost operator binds


def operate(symbol: str, operands: Sequence[Formula]) -> Formula:
    """Returns an operator between its two operands, or before its one."""
    if len(operands) == 1:
        return symbol + _within(operands[0], _PREFIX), _PREFIX
    left, right = operands
    level = _LEVELS[symbol]
    return f"{_within(left, level)} {symbol} {_within(right, level + 1)}", level


def number(value: Any) -> str:
    """Returns a constant, rounded for reading: `0.176777`, `1e-06`, `2`."""
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _within(formula: Formula, level: int) -> str:
    return formula[0] if formula[1] >= level else f"({formula[0]})"
