"""What a program says of itself: printed line by line, and explained as a report."""

from meshdsl.lowering.explain.explanation import Explanation, explain

__all__ = ["Explanation", "explain"]
