"""Clocking: assigns the passes of any schedule to ticks that all stages share.

A program runs as a loop over ticks. In each tick, a stage does at most one forward pass, and then
at most one backward pass. `clocked` simulates this. In each tick, a stage does the next pass of its
row if it is a forward pass and its input has arrived. Then it does the next pass of its row if it
is a backward pass and its gradient has arrived.

A schedule may take longer with ticks than its plan says, because a plan has no common clock. For
example, 1F1B has at most as many live microbatches as stages. With ticks, its stages wait for the
results of each other. `circular` is 1F1B for ticks: its stages do not wait, but it has more live
microbatches.
"""

from __future__ import annotations

from meshdsl.lowering.pipelines.actions import Action, Kind
from meshdsl.lowering.pipelines.checks.checking import check
from meshdsl.lowering.pipelines.schedule import Schedule
from meshdsl.lowering.pipelining.timetable import Pass, Timetable, placement


def clocked(schedule: Schedule) -> Timetable:
    """Returns the timetable of a schedule.

    If the schedule separates gradients of inputs (`I`) and of weights (`W`), the timetable has both
    in the tick of `I`. In separate ticks, each of them would recompute the activations.

    Raises:
        ValueError: the schedule is incorrect, or its chunks are in no order that can be run.
    """
    check(schedule)
    rounds = -(-schedule.chunks // schedule.stages)
    placements = [placement(schedule.stages, rounds, turns) for turns in (False, True)]
    if schedule.placement not in placements:
        raise ValueError(
            f"pipeline schedule `{schedule.name}` cannot be run: chunk c must be on stage c mod "
            f"{schedule.stages}, or turn around as those of zbv; its chunks are on the "
            f"stages {', '.join(map(str, schedule.placement))}. `meshdsl explain "
            "--pipeline_table=-` prints its table; all built-in schedules can be run"
        )
    rows = [_passes(schedule, stage) for stage in range(schedule.stages)]
    forward: dict[Pass, int] = {}
    backward: dict[Pass, int] = {}
    tick = 0
    while any(rows):
        for kind in (Kind.FORWARD, Kind.INPUTS):
            done = []
            for row in rows:
                if (
                    row
                    and row[0].kind is kind
                    and _ready(row[0], tick, schedule, forward, backward)
                ):
                    done.append(row.pop(0))
            times = forward if kind is Kind.FORWARD else backward
            times.update({(action.chunk, action.microbatch): tick for action in done})
        tick += 1
    return Timetable.of(
        schedule.stages,
        rounds,
        schedule.microbatches,
        schedule.name,
        forward,
        backward,
        turns=schedule.placement != placements[0],
    )


def _passes(schedule: Schedule, stage: int) -> list[Action]:
    """Returns the `F` and `I` of a stage, in order."""
    row = [action for action in schedule.rows[stage] if action is not None]
    results = [result for action in row for result in action.results]
    return [result for result in results if result.kind is not Kind.WEIGHTS]


def _ready(
    action: Action,
    tick: int,
    schedule: Schedule,
    forward: dict[Pass, int],
    backward: dict[Pass, int],
) -> bool:
    """Whether a pass has its operands. Those of other stages must be from an earlier tick."""
    chunk, k = action.chunk, action.microbatch
    if action.kind is Kind.FORWARD:
        return chunk == 0 or forward.get((chunk - 1, k), tick) < tick
    if chunk == schedule.chunks - 1:  # the loss is in the tick of the forward pass
        return (chunk, k) in forward
    return (chunk, k) in forward and backward.get((chunk + 1, k), tick) < tick
