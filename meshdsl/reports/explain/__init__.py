"""What a program says of itself: printed line by line, explained as a report, two compared."""

from meshdsl.reports.explain.alternatives import alternatives
from meshdsl.reports.explain.comparison import Comparison, compare
from meshdsl.reports.explain.explanation import Explanation, explain

__all__ = ["Comparison", "Explanation", "alternatives", "compare", "explain"]
