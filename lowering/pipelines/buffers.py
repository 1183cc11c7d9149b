"""Buffers: how many inputs of chunks a stage keeps, and in which buffer each of them is.

The input of a chunk, with all activations that the backward pass needs, is *live* from the start
of the forward pass to the end of the backward pass: of `B`, or of `W` where it is apart. What a
stage has live depends on the order of its row alone, not on the times.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate
from typing import TypeVar

from meshdsl.lowering.pipelines.actions import Kind
from meshdsl.lowering.pipelines.schedule import Row, Schedule

Key = TypeVar("Key")


def live(row: Row) -> list[int]:
    """Returns how many chunk inputs a stage has live during each column of its row."""
    begun = [_count(row, column, Kind.FORWARD) for column in range(len(row))]
    ended = [_count(row, column, Kind.WEIGHTS) for column in range(len(row))]
    return [b - e for b, e in zip(accumulate(begun), [0, *accumulate(ended)], strict=False)]


def _count(row: Row, column: int, kind: Kind) -> int:
    action = row[column]
    return sum(result.kind == kind for result in action.results) if action else 0


def peaks(schedule: Schedule) -> tuple[int, ...]:
    """Returns per stage the most chunk inputs that are live at a time."""
    return tuple(max(live(row), default=0) for row in schedule.rows)


def input_buffers(schedule: Schedule, stage: int) -> dict[tuple[int, int], int]:
    """Returns the buffer in which a stage keeps the input of each (chunk, microbatch).

    Buffers are numbered from 0. There are as many as the peak of the stage, so none could be
    spared. An input is written when its forward pass begins. A lowering that stores what it
    receives ahead of its use needs other buffers for that; `planning.Plan.waiting` counts them.
    """
    columns: dict[tuple[int, int], tuple[int, int]] = {}
    for column, action in enumerate(schedule.rows[stage]):
        for result in action.results if action else ():
            key = (result.chunk, result.microbatch)
            if result.kind == Kind.FORWARD:
                columns[key] = (column, column)
            elif result.kind == Kind.WEIGHTS:
                columns[key] = (columns[key][0], column)
    return assign(columns)


def assign(used: Mapping[Key, tuple[int, int]]) -> dict[Key, int]:
    """Returns a buffer for each value, so that values in use at the same time have others.

    A value is given the first buffer that is free when it comes. For intervals this needs as few
    buffers as possible: as many as there are values in use at the same time.

    Args:
        used: per value the first and the last time at which it is in use.
    """
    last: list[int] = []
    buffers = {}
    for key, (start, end) in sorted(used.items(), key=lambda item: item[1]):
        buffer = next((b for b, busy_until in enumerate(last) if busy_until < start), len(last))
        last[buffer : buffer + 1] = [end]
        buffers[key] = buffer
    return buffers
