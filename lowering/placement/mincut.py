"""Minimum cut of a directed graph, by Dinic's algorithm (Dinic 1970)."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable

INFINITE = float("inf")
_TINY = 1e-9


class CutGraph:
    """A graph with capacities, from `SOURCE` to `SINK`.

    An edge a -> b with capacity c costs c if a is on the source's side and b is not.
    """

    SOURCE = "source"
    SINK = "sink"

    def __init__(self) -> None:
        self._number: dict[Hashable, int] = {self.SOURCE: 0, self.SINK: 1}
        self._edges: list[list[int]] = [[], []]
        # Edges are numbered; edge n ^ 1 is the reverse of edge n.
        self._to: list[int] = []
        self._residual: list[float] = []
        self._once: set[tuple[Hashable, Hashable]] = set()

    def edge(self, start: Hashable, end: Hashable, capacity: float) -> None:
        nodes, edges, number = self._number, self._edges, len(self._to)
        a = nodes.setdefault(start, len(edges))
        if a == len(edges):
            edges.append([])
        b = nodes.setdefault(end, len(edges))
        if b == len(edges):
            edges.append([])
        edges[a].append(number)
        edges[b].append(number + 1)  # the reverse edge; it has no residual capacity yet
        self._to += (b, a)
        self._residual += (capacity, 0.0)

    def edge_once(self, start: Hashable, end: Hashable, capacity: float) -> None:
        """Adds an edge unless this method has added it before."""
        if (start, end) not in self._once:
            self._once.add((start, end))
            self.edge(start, end, capacity)

    def source_side(self) -> set[Hashable]:
        """Returns the smallest source side of a minimum cut."""
        while True:
            level = self._levels()
            if level[1] < 0:
                return {key for key, node in self._number.items() if level[node] >= 0}
            progress = [0] * len(self._edges)
            while self._push(level, progress):
                pass

    def _levels(self) -> list[int]:
        """Returns the distance of each node from the source over residual edges; -1: no path."""
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
                    queue.append(neighbour)
        return level

    def _push(self, level: list[int], progress: list[int]) -> bool:
        """Sends flow along a path of increasing level; returns whether there is one."""
        to, residual = self._to, self._residual
        path: list[int] = []
        node = 0
        while node != 1:
            edges, next_level = self._edges[node], level[node] + 1
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
                    return False
                node = to[path.pop() ^ 1]
                progress[node] += 1
        amount = min([residual[edge] for edge in path])
        assert amount < INFINITE, "edges of infinite capacity connect source and sink"
        for edge in path:
            residual[edge] -= amount
            residual[edge ^ 1] += amount
        return True
