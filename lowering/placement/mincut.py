"""Minimum cut of a directed graph, by Dinic's algorithm (Dinic 1970)."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable

INFINITE = float("inf")
_TINY = 1e-9


class _Numbers(dict[Hashable, int]):
    """Numbers nodes in the order in which they are first asked for."""

    def __missing__(self, node: Hashable) -> int:
        number = self[node] = len(self)
        return number


class CutGraph:
    """A graph with capacities, from `SOURCE` to `SINK`.

    An edge a -> b with capacity c costs c if a is on the source's side and b is not.
    """

    SOURCE = "source"
    SINK = "sink"

    def __init__(self) -> None:
        self._number = _Numbers({self.SOURCE: 0, self.SINK: 1})
        # Edges are numbered; edge n ^ 1 is the reverse of edge n. Reverse edges have no residual
        # capacity before the first flow.
        self._to: list[int] = []
        self._residual: list[float] = []
        self._edges: list[list[int]] = []  # by node
        self._once: set[tuple[Hashable, Hashable]] = set()

    def edge(self, start: Hashable, end: Hashable, capacity: float) -> None:
        number = self._number
        a = number[start]
        self._to += (number[end], a)
        self._residual += (capacity, 0.0)

    def edge_once(self, start: Hashable, end: Hashable, capacity: float) -> None:
        """Adds an edge unless this method has added it before."""
        if (start, end) not in self._once:
            self._once.add((start, end))
            self.edge(start, end, capacity)

    def source_side(self) -> set[Hashable]:
        """Returns the smallest source side of a minimum cut."""
        self._edges = [[] for _ in self._number]
        for number, end in enumerate(self._to):
            self._edges[end].append(number ^ 1)
        while True:
            level = self._levels()
            if level[1] < 0:
                return {key for key, node in self._number.items() if level[node] >= 0}
            self._push(level)

    def _levels(self) -> list[int]:
        """Returns the distance of each node from the source over residual edges; -1: no path.

        If the sink can be reached, nodes that are farther away have -1 as well.
        """
        to, residual, edges = self._to, self._residual, self._edges
        level = [-1] * len(edges)
        level[0] = 0
        queue = deque([0])
        while queue:
            node = queue.popleft()
            next_level = level[node] + 1
            for edge in edges[node]:
                neighbour = to[edge]
                if level[neighbour] < 0 and residual[edge] > _TINY:
                    level[neighbour] = next_level
                    if neighbour == 1:
                        return level
                    queue.append(neighbour)
        return level

    def _push(self, level: list[int]) -> None:
        """Sends flow along paths of increasing level until none is left."""
        to, residual, edges_of = self._to, self._residual, self._edges
        progress = [0] * len(edges_of)
        path: list[int] = []
        node = 0
        while True:
            edges, next_level = edges_of[node], level[node] + 1
            for index in range(progress[node], len(edges)):
                edge = edges[index]
                if level[to[edge]] == next_level and residual[edge] > _TINY:
                    progress[node] = index
                    path.append(edge)
                    node = to[edge]
                    break
            else:
                progress[node] = len(edges)
                if not path:
                    return
                node = to[path.pop() ^ 1]
                progress[node] += 1
            if node == 1:
                amount = min([residual[edge] for edge in path])
                assert amount < INFINITE, "edges of infinite capacity connect source and sink"
                full = len(path)
                for number, edge in enumerate(path):
                    residual[edge] -= amount
                    residual[edge ^ 1] += amount
                    if residual[edge] <= _TINY:
                        full = min(full, number)
                # The next path may share the edges before the first one that is full.
                node = to[path[full] ^ 1]
                del path[full:]
