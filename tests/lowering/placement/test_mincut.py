"""Minimum cuts, against trying every cut of small random graphs."""

import itertools
import random

import pytest

from meshdsl.lowering.placement.mincut import INFINITE, CutGraph

NODES = "abcdef"


def cost(edges, side):
    """Returns what the edges that leave the source's side cost."""
    return sum(c for start, end, c in edges if start in side and end not in side)


@pytest.mark.parametrize("seed", range(60))
def test_the_cut_is_the_cheapest_and_the_smallest_of_these(seed):
    rng = random.Random(seed)
    ends = [CutGraph.SOURCE, *NODES, CutGraph.SINK]
    edges = []
    for _ in range(rng.randint(4, 16)):
        start, end = rng.sample(ends, 2)
        endless = rng.random() < 0.15 and {start, end} != {CutGraph.SOURCE, CutGraph.SINK}
        edges.append((start, end, INFINITE if endless else float(rng.randint(0, 5))))
    sides = [
        {CutGraph.SOURCE, *some} for n in range(7) for some in itertools.combinations(NODES, n)
    ]
    least = min(cost(edges, side) for side in sides)
    if least == INFINITE:
        return
    graph = CutGraph()
    for node in NODES:
        graph.edge(node, CutGraph.SINK, 0.0)
    for edge in edges:
        graph.edge(*edge)
    found = graph.source_side()
    assert cost(edges, found) == least
    assert found == set.intersection(*(side for side in sides if cost(edges, side) == least))


def test_an_edge_that_is_added_once_counts_once():
    def cost(times):
        graph = CutGraph()
        for _ in range(times):
            graph.edge_once(graph.SOURCE, "a", 2.0)
        graph.edge("a", graph.SINK, 3.0)
        return "a" in graph.source_side()

    assert not cost(1)
    assert not cost(2)  # two edges of 2 would be more than 3
