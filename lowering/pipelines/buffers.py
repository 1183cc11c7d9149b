"""Buffers: the number of chunk inputs that a stage keeps, and which values share a buffer.

A stage keeps the input of a chunk with all activations that the backward pass needs. They are
*live* from the start of the forward pass to the end of the backward pass (`B` or `W`). The number
of live inputs depends on the order of the row only, not on times.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate
from typing import TypeVar

from meshdsl.lowering.pipelines.actions import Kind
from meshdsl.lowering.pipelines.schedule import Row, Schedule

Key = TypeVar("Key")


def live(row: Row) -> list[int]:
    """Returns the number of live chunk inputs of a stage in each column of its row."""
    begun = [_count(row, column, Kind.FORWARD) for column in range(len(row))]
    ended = [_count(row, column, Kind.WEIGHTS) for column in range(len(row))]
    return [b - e for b, e in zip(accumulate(begun), [0, *accumulate(ended)], strict=False)]


def _count(row: Row, column: int, kind: Kind) -> int:
    action = row[column]
    return sum(result.kind == kind for result in action.results) if action else 0


def peaks(schedule: Schedule) -> tuple[int, ...]:
    """Returns the largest number of live chunk inputs of each stage."""
    return tuple(max(live(row), default=0) for row in schedule.rows)


def assign(used: Mapping[Key, tuple[int, int]]) -> dict[Key, int]:
    """Returns a buffer for each value. Values in use at the same time have different buffers.

    Values are assigned in the order of their first use; each gets the first free buffer. For
    intervals, this needs the fewest buffers: as many as values are in use at the same time.

    Args:
        used: the first and the last time of use of each value.
    """
    last: list[int] = []
    buffers = {}
    for key, (start, end) in sorted(used.items(), key=lambda item: item[1]):
        buffer = next((b for b, busy_until in enumerate(last) if busy_until < start), len(last))
        last[buffer : buffer + 1] = [end]
        buffers[key] = buffer
    return buffers
