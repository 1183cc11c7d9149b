"""Loops: what can be said of the bodies of operations."""

from __future__ import annotations

from collections.abc import Iterator

from meshdsl.tracing.graph import Graph, Operation


def within(graph: Graph) -> Iterator[Operation]:
    """Yields the operations of a graph and of their bodies."""
    for op in graph.operations:
        yield op
        for body in op.bodies:
            yield from within(body)


def is_sum(body: Graph, start: int, end: int) -> bool:
    """Whether a carry is only added to: nothing else in the body depends on it.

    Args:
        start, end: the numbers of the carry among the body's inputs and outputs.
    """
    carry, result = body.inputs[start], body.outputs[end]
    readers = [op for op in body.operations for t in op.inputs if t is carry or t is result]
    makers = [op for op in body.operations if op.outputs[0] is result]
    returned = [t for t in body.outputs if t is carry or t is result]
    return len(returned) == 1 and readers == makers and [op.name for op in makers] == ["add"]
