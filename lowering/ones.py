"""Ones: dims of size 1 that stay unsplit, although a layout rule splits dims of their name.

There is nothing to split in one position: one device would have it, and the others pads. A decoder
step computes one position of `length` and writes it into a cache whose `length` is split: each
device that has the row writes it where it falls into its block, and nothing moves.

That is so for a name unless an operation takes tensors with one and with several positions of it: a
slice of one position is cheapest left where it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from meshdsl.graph import Graph
from meshdsl.layouts.layout import Layout

_SIDE_BY_SIDE = frozenset(["barrier"])  # operations on several tensors that have nothing in common


def unsplit_ones(graph: Graph, layout: Layout) -> Layout:
    """Returns a layout that leaves dims of size 1 unsplit where no operation resizes them.

    `unsplit_ones(graph, layout).assign(row.shape)`.
    """
    ones = {d.name for t in graph.inputs for d in t.shape if d.size == 1}
    resized: set[str] = set()
    for sizes in _sizes(graph):
        ones |= {name for name, size in sizes if size == 1}
        resized |= {name for name, size in sizes if size == 1 and len(_of(sizes, name)) > 1}
    split = {rule.dim for rule in layout.rules if rule.axes}
    ones = (ones - resized) & split
    return replace(layout, ones=frozenset(ones)) if ones else layout


def _sizes(graph: Graph) -> Iterator[set[tuple[str, int]]]:
    """Yields the dims of every operation, those inside of bodies too."""
    for op in graph.operations:
        for body in op.bodies:
            yield from _sizes(body)
        tensors = (*op.inputs, *op.outputs)
        if op.bodies or op.name in _SIDE_BY_SIDE:
            for tensor in tensors:
                yield {(d.name, d.size) for d in tensor.shape}
        else:
            yield {(d.name, d.size) for tensor in tensors for d in tensor.shape}


def _of(sizes: set[tuple[str, int]], name: str) -> list[int]:
    return [size for other, size in sizes if other == name]
