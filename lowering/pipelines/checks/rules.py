"""Rules of correct schedules: one function per rule.

A function yields all faults against its rule, in any order. It looks at the table only; it does not
run the schedule. `checking.check` reports the fault with the least column, and then the least
stage.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial

from meshdsl.lowering.pipelines.actions import (
    OF_WEIGHTS,
    SENDS,
    Action,
    Kind,
    backward,
    forward,
    inputs,
    weights,
)
from meshdsl.lowering.pipelines.buffers import live
from meshdsl.lowering.pipelines.checks.faults import Fault
from meshdsl.lowering.pipelines.dependencies import carried, needs
from meshdsl.lowering.pipelines.schedule import Place, Schedule


def rows_have_work(schedule: Schedule) -> Iterator[Fault]:
    """Each stage has a computation."""
    working = {stage for stage, _, action in schedule.cells() if action.computes}
    for stage in sorted(set(range(schedule.stages)) - working):
        fix = "Remove the row, or move the actions of a chunk into it"
        yield Fault(stage, 0, None, "the stage computes nothing", fix)


def numbers_exist(schedule: Schedule) -> Iterator[Fault]:
    """The schedule has the chunk and the microbatch of each action."""
    for stage, column, action in schedule.cells():
        at = partial(Fault, stage, column, action)
        for part in action.singles:
            if part.chunk >= schedule.chunks:
                chunks = f"the chunks are 0 to {schedule.chunks - 1}"
                yield at(f"there is no chunk {part.chunk}", f"Remove it: {chunks}")
            if part.microbatch >= schedule.microbatches:
                batches = f"the microbatches are 0 to {schedule.microbatches - 1}"
                yield at(f"there is no microbatch {part.microbatch}", f"Remove it: {batches}")


def overlaps_are_pairs(schedule: Schedule) -> Iterator[Fault]:
    """An overlap is a forward pass and a backward pass that do not need each other."""
    for stage, column, action in schedule.cells():
        if action.kind != Kind.OVERLAP:
            continue
        at = partial(Fault, stage, column, action)
        kinds = [part.kind for part in action.parts]
        if kinds not in (["F", "B"], ["F", "I"]):
            yield at(
                "an overlap is one forward pass and then one backward pass",
                "Write it as `(0F7;7B3)OVERLAP_F_B`, and other actions as cells of their own",
            )
            continue
        for part in action.parts:
            for need in needs(part, schedule.chunks):
                if need in action.results:
                    yield at(
                        f"`{part}` needs `{need}` of the same overlap",
                        "Write them as two cells, one after the other",
                    )


def chunks_have_one_stage(schedule: Schedule) -> Iterator[Fault]:
    """One row has all actions of a chunk."""
    for stage, column, action in schedule.cells():
        for part in action.singles:
            home = _home(schedule, part.chunk)
            if home not in (None, stage):
                why = f"chunk {part.chunk} is on stage {home}"
                fix = f"Move `{part}` to the row of stage {home}"
                yield Fault(stage, column, action, why, fix)


def _home(schedule: Schedule, chunk: int) -> int | None:
    return schedule.placement[chunk] if chunk < schedule.chunks else None


def results_are_computed_once(schedule: Schedule) -> Iterator[Fault]:
    """A stage computes no result twice, and sends and receives no message twice."""
    where = schedule.places
    for stage, column, action in schedule.cells():
        for one in action.results or (action,):
            if one.kind not in OF_WEIGHTS and where[one] != (stage, column):
                first, at = where[one]
                why = f"`{one}` is already in stage {first}, column {at + 1}"
                yield Fault(stage, column, action, why, "Remove one of the two")


def nothing_is_missing(schedule: Schedule) -> Iterator[Fault]:
    """Each chunk does `F`, `I` and `W` for each microbatch."""
    where = schedule.places
    first_use: dict[Action, Place] = {}
    for stage, column, action in schedule.cells():
        used = needs(action, schedule.chunks)
        for need in (carried(action),) if action.kind in SENDS else used:
            if _home(schedule, need.chunk) == stage:
                first_use.setdefault(need, (stage, column))
    present = {result.chunk for _, _, action in schedule.cells() for result in action.results}
    nowhere = {*range(schedule.chunks)} - present
    for chunk in sorted(nowhere):
        cells = [cell for cell in schedule.cells() if cell[2].singles[0].chunk > chunk]
        why = f"no stage has chunk {chunk}"
        fix = f"Number chunks from 0 without a gap, or add the actions of chunk {chunk} to a row"
        yield Fault(*min(cells, key=lambda cell: (cell[1], cell[0])), why, fix)
    for chunk, home in enumerate(schedule.placement):
        if chunk in nowhere:
            continue
        for k in range(schedule.microbatches):
            absent = [a for m in (forward, inputs, weights) if (a := m(chunk, k)) not in where]
            for action in absent:
                end = len(schedule.rows[home])
                column = first_use.get(action, (home, end))[1]
                named = action
                if inputs(chunk, k) in absent and weights(chunk, k) in absent:
                    named = forward(chunk, k) if action == forward(chunk, k) else backward(chunk, k)
                before = f"before column {column + 1}" if column < end else "at the end"
                fix = f"Add `{named}` to the row of stage {home}, {before}"
                yield Fault(home, column, named, "it is missing", fix)


def needs_come_first(schedule: Schedule) -> Iterator[Fault]:
    """If a row has an action and a result that the action needs, the result is first."""
    where = schedule.places
    for stage, column, action in schedule.cells():
        for need in needs(action, schedule.chunks):
            there = where.get(need)
            if there and there[0] == stage and there[1] > column:
                # A cell with `0B1` has the results `0I1` and `0W1`; users see the cell.
                cell = schedule.rows[stage][there[1]]
                why = f"it needs `{cell}`, which is in column {there[1] + 1}"
                yield Fault(stage, column, action, why, f"Move it behind `{cell}`")


def weights_are_gathered(schedule: Schedule) -> Iterator[Fault]:
    """A stage gathers weights before their use, and reduces gradients after the last `W`.

    The first part applies to chunks with `UNSHARD` or `RESHARD`, the second one to chunks with
    `REDUCE_GRAD`.
    """
    for stage, row in enumerate(schedule.rows):
        present = [action for action in row if action]
        managed = {a.chunk for a in present if a.kind in (Kind.UNSHARD, Kind.RESHARD)}
        left = Counter(r.chunk for a in present for r in a.results if r.kind == Kind.WEIGHTS)
        gathered: set[int] = set()
        reduced: set[int] = set()
        for column, action in enumerate(row):
            if action is None:
                continue
            at = partial(Fault, stage, column, action)
            chunk = action.chunk
            if action.kind == Kind.UNSHARD:
                if chunk in gathered:
                    yield at("the weights are gathered already", "Remove one of the two")
                gathered.add(chunk)
            elif action.kind == Kind.RESHARD:
                if chunk not in gathered:
                    yield at("the weights are not gathered", f"Put `{chunk}UNSHARD` before it")
                gathered.discard(chunk)
            elif action.kind == Kind.REDUCE_GRAD:
                if left[chunk]:
                    why = f"{left[chunk]} gradients of the chunk's weights are computed later"
                    yield at(why, "Move it behind the last `W` or `B` of the chunk")
                if chunk in reduced:
                    yield at("the gradients are reduced already", "Remove one of the two")
                reduced.add(chunk)
            for used in dict.fromkeys(result.chunk for result in action.results):
                if used in managed - gathered:
                    why = f"the weights of chunk {used} are not gathered"
                    yield at(why, f"Put `{used}UNSHARD` before it")
            left.subtract(r.chunk for r in action.results if r.kind == Kind.WEIGHTS)


def buffers_suffice(schedule: Schedule, buffers: int | Sequence[int]) -> Iterator[Fault]:
    """A stage has a buffer for each live chunk input."""
    for stage, row in enumerate(schedule.rows):
        limit = buffers if isinstance(buffers, int) else buffers[stage]
        for column, count in enumerate(live(row)):
            if count > limit:
                why = f"{count} chunk inputs are live, and the stage has {limit} buffers"
                fix = f"Do a backward pass before it, or give the stage {max(live(row))} buffers"
                yield Fault(stage, column, row[column], why, fix)
                break
