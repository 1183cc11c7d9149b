"""Checking: proves that a schedule is right, or names the first action that is wrong.

A correct schedule computes the gradients of the model, whatever its actions and messages take:

* each chunk has one stage, and each stage a chunk;
* each chunk does the forward pass and both parts of the backward pass of each microbatch once;
* in a row, what an action needs stands before it;
* each result that another stage needs is sent once and received once, behind its computation and
  before its use, and messages of two stages are received in the order in which they are sent.
  A schedule without any message is right too: its results travel by themselves;
* weights that are gathered and freed are there when they are used;
* no stage waits forever;
* if the caller says how many buffers a stage has, they suffice.
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
        buffers: how many chunk inputs a stage can keep, or how many each of them can. A forward
            pass needs one until `B` or `W` has ended. None is any number.
        in_flight: how many messages from one stage to another can be under way. A send waits for
            room. With 0 it waits until it is received. None is any number.

    Raises:
        ScheduleError: The schedule is wrong. Its `fault` has the first action that is wrong with
            its stage and column, why it is wrong, and what to do.
    """
    if fault := first_fault(schedule, buffers=buffers, in_flight=in_flight):
        raise ScheduleError(schedule.name, fault)


def first_fault(
    schedule: Schedule, *, buffers: int | Sequence[int] | None = None, in_flight: int | None = None
) -> Fault | None:
    """Returns the first thing that is wrong with a schedule, or None.

    The first one is that in the least column, of several the one of the least stage. A deadlock
    comes after all others, since they may be its reason.
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
