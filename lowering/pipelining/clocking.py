"""Clocking: any schedule of forward and backward passes on ticks that all stages share.

A loop of one program gives each stage at most one forward pass per tick, and then at most one
backward pass. `clocked` runs through a table of actions in this way: in each tick, a stage does the
next forward pass of its row, if its input has come, and then the next backward pass.

Stages without a common clock may overtake each other within a tick. So a table may take longer on
the clock than its plan says: 1F1B has as few live microbatches as stages, and waits for each on its
way forth and back. `circular` is 1F1B for this clock; it has no such waits, and more of them live.
"""

from __future__ import annotations

from meshdsl.lowering.pipelines.actions import Action, Kind
from meshdsl.lowering.pipelines.checks.checking import check
from meshdsl.lowering.pipelines.schedule import Schedule
from meshdsl.lowering.pipelining.timetable import Pass, Timetable


def clocked(schedule: Schedule) -> Timetable:
    """Returns the ticks of a schedule.

    Where gradients of inputs (`I`) and of weights (`W`) are apart, both are computed in the tick of
    `I`: apart, each would compute the activations again.

    Raises:
        ValueError: the schedule is wrong, or its chunks are not dealt to the stages in turn.
    """
    check(schedule)
    dealt = tuple(chunk % schedule.stages for chunk in range(schedule.chunks))
    if schedule.placement != dealt or schedule.chunks % schedule.stages:
        raise ValueError(
            f"pipeline schedule `{schedule.name}` cannot be run: chunk c must be on stage c mod "
            f"{schedule.stages}, so that a stage sends to the next one; its chunks are on the "
            f"stages {', '.join(map(str, schedule.placement))}. It can be planned only"
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
    rounds = schedule.chunks // schedule.stages
    return Timetable.of(
        schedule.stages, rounds, schedule.microbatches, schedule.name, forward, backward
    )


def _passes(schedule: Schedule, stage: int) -> list[Action]:
    """Returns the forward passes and the gradients of inputs of a stage, in order."""
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
    """Whether what a pass reads has been computed: by other stages, in an earlier tick."""
    chunk, k = action.chunk, action.microbatch
    if action.kind is Kind.FORWARD:
        return chunk == 0 or forward.get((chunk - 1, k), tick) < tick
    if chunk == schedule.chunks - 1:  # the loss follows its forward pass in the same tick
        return (chunk, k) in forward
    return (chunk, k) in forward and backward.get((chunk + 1, k), tick) < tick
