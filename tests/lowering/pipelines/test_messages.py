"""Messages: sends and receives that no stage waits for needlessly."""

import pytest

from meshdsl.lowering.pipelines import csv_files
from meshdsl.lowering.pipelines.checks.checking import first_fault
from meshdsl.lowering.pipelines.costs import Costs
from meshdsl.lowering.pipelines.messages import with_messages
from meshdsl.lowering.pipelines.named import NAMES, named
from meshdsl.lowering.pipelines.planning import plan


def test_each_result_for_another_stage_is_sent_and_received():
    assert csv_files.text(with_messages(named("1f1b", 2, 2))) == (
        "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n"
        "1RECV_F0,1RECV_F1,1F0,1B0,1SEND_B0,1F1,1B1,1SEND_B1\n"
    )


def test_between_chunks_of_one_stage_nothing_is_sent():
    rows = with_messages(named("zbv", 2, 1)).rows
    assert [
        str(a) for a in rows[1]
    ] == "1RECV_F0 1F0 2F0 2SEND_F0 2RECV_B0 2I0 2W0 1I0 1SEND_B0 1W0".split()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("p, m", [(1, 3), (2, 5), (3, 7), (4, 4), (5, 3)])
def test_the_schedule_is_right_for_every_kind_of_message_and_takes_no_longer(name, p, m):
    schedule = named(name, p, m)
    explicit = with_messages(schedule)
    for in_flight in (0, 1, None):
        assert first_fault(explicit, in_flight=in_flight) is None
    assert plan(explicit).makespan == plan(schedule).makespan
    assert explicit.without_messages() == schedule.without_empty_cells()


@pytest.mark.parametrize("name", NAMES)
def test_messages_travel_beside_work_as_those_without_a_cell_do(name):
    costs = Costs(forward=2, inputs=3, weights=2, send=2)
    schedule = named(name, 3, 6)
    explicit = with_messages(schedule, costs)
    assert first_fault(explicit, in_flight=0) is None
    times = [[(s.start, s.end) for s in row] for row in plan(schedule, costs).spans]
    assert [[(s.start, s.end) for s in row] for row in plan(explicit, costs).spans] == times


def test_without_times_there_is_no_order_of_messages():
    message = "`0F0` of schedule `1f1b` takes no time, so the order of messages is not known"
    with pytest.raises(ValueError, match=message):
        with_messages(named("1f1b", 2, 2), Costs(forward=0))


def test_messages_are_not_added_twice():
    explicit = with_messages(named("1f1b", 2, 2))
    message = r"schedule `1f1b` has sends and receives. Call `without_messages\(\)` first"
    with pytest.raises(ValueError, match=message):
        with_messages(explicit)
