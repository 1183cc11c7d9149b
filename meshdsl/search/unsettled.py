"""Unsettled: the candidates that no decision was made about, by their least time.

The least of their bounds is what the best plan is compared with: no plan of the space is faster,
but for those that were decided about. Bounds of many points at once are not complete: they lack
what is sent. They are completed one by one, when they are the least.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

from meshdsl.search.candidates import Candidate


class Unsettled:
    """The candidates that may still be faster than the best plan.

    Args:
        complete: returns the complete bound of a candidate.
        known: the complete bounds that are known, by the numbers of the candidates.
        settled: the numbers of those that are decided about, or that have no program.
    """

    def __init__(
        self,
        candidates: Sequence[Candidate],
        complete: Callable[[Candidate], float],
        known: Mapping[int, float],
        settled: Collection[int],
    ) -> None:
        self._complete = complete
        self._settled = set(settled)
        self._known = set(known)
        self._rows = {row.order: row for row in candidates}
        self._heap = [(known.get(row.order, row.bound), row.order) for row in candidates]
        heapq.heapify(self._heap)

    def first(self) -> Candidate | None:
        """Returns the candidate with the least bound, which is complete; None if none is left."""
        heap = self._heap
        while heap:
            bound, order = heap[0]
            if order in self._settled:
                heapq.heappop(heap)
            elif order in self._known:
                return replace(self._rows[order], bound=bound)
            else:
                self._known.add(order)
                heapq.heapreplace(heap, (self._complete(self._rows[order]), order))
        return None

    def settle(self, row: Candidate) -> None:
        """Removes a candidate."""
        self._settled.add(row.order)

    def below(self, seconds: float) -> int:
        """Returns how many candidates are left whose bounds, as far as known, are below a time."""
        return sum(bound < seconds and order not in self._settled for bound, order in self._heap)
