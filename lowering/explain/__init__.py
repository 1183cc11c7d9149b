"""What a program says of itself: printed line by line, explained as a report, two compared."""

from meshdsl.lowering.explain.alternatives import alternatives
from meshdsl.lowering.explain.comparison import Comparison, compare
from meshdsl.lowering.explain.explanation import Explanation, explain

__all__ = ["Comparison", "Explanation", "alternatives", "compare", "explain"]
