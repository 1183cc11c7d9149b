"""Planning: times, bubbles, live activations and critical paths, against hand-computed figures."""

import itertools

import pytest

from meshdsl.lowering.pipelines.checks.checking import ScheduleError
from meshdsl.lowering.pipelines.costs import Costs
from meshdsl.lowering.pipelines.csv_files import parse
from meshdsl.lowering.pipelines.named import named
from meshdsl.lowering.pipelines.planning import plan


def test_one_microbatch_goes_forth_and_back():
    planned = plan(named("1f1b", 3, 1), Costs(forward=2, backward=3, send=1))
    assert planned.makespan == 3 * (2 + 3) + 2 * 2 * 1
    assert planned.busy == (5, 5, 5)
    assert planned.bubbles == (14, 14, 14)
    assert planned.bubble == pytest.approx(14 / 19)
    assert planned.pauses == (14, 7, 0)


def test_costs_may_be_given_per_chunk():
    costs = Costs(forward=(1, 4), inputs=(2, 1), weights=(1, 3), send=(10,) * 2)
    planned = plan(parse("0F0,0I0,0W0\n1F0,1I0,1W0"), costs)
    times = [[(str(s.action), s.start, s.end) for s in row] for row in planned.spans]
    assert times[0] == [("0F0", 0, 1), ("0I0", 26, 28), ("0W0", 28, 29)]
    assert times[1] == [("1F0", 11, 15), ("1I0", 15, 16), ("1W0", 16, 19)]
    assert planned.makespan == 29


def test_a_gradient_takes_the_time_of_the_boundary_that_it_crosses():
    planned = plan(named("1f1b", 3, 1), Costs(send=(1, 5, 100)))
    assert planned.makespan == 3 * 3 + 2 * (1 + 5)


def test_a_link_carries_one_message_at_a_time():
    planned = plan(parse("0F0,0F1,0B0,0B1\n1F0,1F1,1B0,1B1"), Costs(send=(3, 0)))
    assert [s.start for s in planned.spans[1]] == [4, 7, 8, 10]
    assert [m.start for m in planned.messages.values() if str(m.action)[1:] == "SEND_F1"] == [4]


def test_messages_travel_beside_work():
    """Work hides the sends of all microbatches but the first and the last."""
    fast, slow = (plan(named("gpipe", 2, 10), Costs(send=send)) for send in (0, 1))
    assert slow.makespan == fast.makespan + 2


def test_a_message_waits_until_both_stages_are_ready():
    text = "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n"
    early = "1RECV_F0,1F0,1RECV_F1,1B0,1SEND_B0,1F1,1B1,1SEND_B1"
    late = "1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1"
    costs = Costs(send=(1, 0))
    assert [s.start for s in plan(parse(text + early), costs).spans[1]] == [2, 3, 5, 6]
    assert [s.start for s in plan(parse(text + late), costs).spans[1]] == [2, 3, 6, 7]


def test_an_overlap_takes_a_share_of_its_parts():
    schedule = parse("0F0,(0F1;0B0)OVERLAP_F_B,0B1")
    assert plan(schedule).makespan == 6
    assert plan(schedule, Costs(overlap=0.5)).makespan == 4.5
    assert plan(schedule, Costs(overlap=0)).makespan == 3


def test_actions_on_weights_take_no_time_of_a_stage():
    assert plan(parse("0UNSHARD,0F0,0B0,0RESHARD,0REDUCE_GRAD")).makespan == 3


def test_live_activations_over_time():
    planned = plan(parse("0F0,0F1,0I0,0W0,0B1"), Costs(activations=8, kept=0.25))
    assert planned.live == (((0, 8), (1, 16), (3, 10), (4, 8), (6, 0)),)
    assert planned.peaks == (16,)
    assert plan(
        parse("0F0,0B0,1F0,1B0\n".replace("0B0,1F0,1B0", "1F0,1B0,0B0")),
        Costs(activations=(1.0, 5.0)),
    ).peaks == (6,)


def test_messages_that_wait_are_counted():
    assert plan(parse("0F0,0F1,0B0,0B1\n1F0,1F1,1B0,1B1")).waiting == (0, 0)
    planned = plan(parse("0F0,0F1,0F2,0B2,0B1,0B0\n1F0,1F1,1F2,1B0,1B1,1B2"), Costs(forward=(1, 2)))
    assert planned.waiting == (2, 1)


def test_the_critical_path_has_no_gap_and_is_the_makespan():
    for name in ("gpipe", "1f1b", "interleaved", "zb-h1", "zbv", "circular"):
        planned = plan(named(name, 3, 5), Costs(forward=2, inputs=3, weights=1, send=1))
        path = planned.critical_path
        assert path[0].start == 0 and path[-1].end == planned.makespan
        assert all(a.end == b.start for a, b in itertools.pairwise(path))


def test_the_critical_path_goes_through_the_slow_chunk():
    planned = plan(named("1f1b", 3, 20), Costs(forward=(1, 5, 1), backward=(2, 10, 2)))
    steps = [str(span.action) for span in planned.critical_path]
    assert [s for s in steps if s[0] == "1"] == [str(span.action) for span in planned.spans[1]]
    assert planned.makespan == 1 + 20 * 15 + 2
    assert planned.critical_path[0].column == 0


def test_sends_are_on_the_critical_path_if_they_take_time():
    path = plan(named("1f1b", 2, 1), Costs(send=1)).critical_path
    assert [str(s.action) for s in path] == ["0F0", "0SEND_F0", "1F0", "1B0", "1SEND_B0", "0B0"]
    assert [s.column for s in path] == [0, -1, 0, 1, -1, 1]
    path = plan(named("1f1b", 2, 1)).critical_path
    assert [str(s.action) for s in path] == ["0F0", "1F0", "1B0", "0B0"]


def test_a_wrong_schedule_has_no_plan():
    with pytest.raises(ScheduleError, match="schedule `csv` is wrong at stage 0, column 1, `0B0`"):
        plan(parse("0B0,0F0"))


def test_times_that_cost_nothing_have_no_bubble():
    assert plan(named("1f1b", 2, 2), Costs(forward=0, backward=0)).bubble == 0
