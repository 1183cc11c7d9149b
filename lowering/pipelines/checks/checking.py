"""Checking: proves that a schedule is correct, or reports the first wrong action.

A correct schedule computes the gradients of the model for any times of actions and messages:

* each chunk has one stage, and each stage has a chunk;
* each chunk does `F`, `I` and `W` once for each microbatch;
* if a row has an action and a result that the action needs, the result is first;
* a schedule has no messages, or it has a send and a receive for each result that another stage
  needs. The send is behind the computation, and the receive is before the use;
* a stage receives the messages of another stage in the order in which that stage sends them;
* weights that a stage gathers and frees are gathered when a computation uses them;
* no stage waits forever;
* if the caller gives a number of buffers, it is enough.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from meshdsl.lowering.pipelines.checks import message_rules, rules
from meshdsl.lowering.pipelines.checks.deadlocks import deadlock
from meshdsl.lowering.pipelines.checks.faults import Fault, ScheduleError
from meshdsl.lowering.pipelines.schedule import Schedule


def check(
    schedule: Schedule, *, buffers: int | Sequence[int] | None = None, in_flight: int | None = None
) -> None:
    """Checks a schedule.

    Args:
        schedule: the schedule.
        buffers: the most chunk inputs that a stage can keep; one number for all stages, or one
            per stage. An input needs a buffer from `F` until the end of `B` or `W`. With None,
            there is no limit.
        in_flight: the most messages in flight from one stage to another. A send waits for room.
            With 0, it waits until the other stage receives. With None, there is no limit.

    Raises:
        ScheduleError: The schedule is incorrect. Its `fault` has the first wrong action with its
            stage and column, the reason, and the fix.
    """
    if fault := first_fault(schedule, buffers=buffers, in_flight=in_flight):
        raise ScheduleError(schedule.name, fault)


def first_fault(
    schedule: Schedule, *, buffers: int | Sequence[int] | None = None, in_flight: int | None = None
) -> Fault | None:
    """Returns the first fault of a schedule, or None.

    The first fault has the least column; of several, the least stage. A deadlock is reported only
    if there is no other fault, because other faults may cause it.
    """
    faults = [*_faults(schedule)]
    if buffers is not None:
        faults += rules.buffers_suffice(schedule, buffers)
    if faults:
        return min(faults, key=lambda fault: (fault.column, fault.stage))
    return deadlock(schedule, in_flight)


def _faults(schedule: Schedule) -> Iterator[Fault]:
    yield from rules.rows_have_work(schedule)
    yield from rules.numbers_exist(schedule)
    yield from rules.overlaps_are_pairs(schedule)
    yield from rules.chunks_have_one_stage(schedule)
    yield from rules.results_are_computed_once(schedule)
    yield from rules.nothing_is_missing(schedule)
    yield from rules.needs_come_first(schedule)
    yield from rules.weights_are_gathered(schedule)
    if schedule.has_messages:
        yield from message_rules.messages_are_needed(schedule)
        yield from message_rules.messages_are_sent_and_received(schedule)
        yield from message_rules.messages_are_received_in_order(schedule)
