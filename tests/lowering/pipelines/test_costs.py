"""Costs: numbers for all chunks, or one per chunk."""

import pytest

from meshdsl.lowering.pipelines.actions import Action
from meshdsl.lowering.pipelines.costs import Costs
from meshdsl.lowering.pipelines.named import named
from meshdsl.lowering.pipelines.planning import plan


@pytest.mark.parametrize(
    "text, seconds",
    [
        ("1F0", 3),
        ("1I0", 5),
        ("1W0", 8),
        ("1B0", 13),
        ("(0F1;1B0)OVERLAP_F_B", 15),
        ("0SEND_F0", 0),
    ],
)
def test_an_action_takes_the_time_of_its_chunk(text, seconds):
    costs = Costs(forward=(2, 3), inputs=(4, 5), weights=(7, 8))
    assert costs.seconds(Action.parse(text)) == seconds


def test_a_full_backward_pass_may_take_another_time_than_its_parts():
    assert Costs(backward=1.5).seconds(Action.parse("0B0")) == 1.5


def test_costs_of_another_number_of_chunks_are_refused():
    message = "`forward` has 3 numbers, and the schedule has 2 chunks: give one number per chunk"
    with pytest.raises(ValueError, match=message):
        plan(named("1f1b", 2, 2), Costs(forward=(1, 2, 3)))


def test_negative_times_are_refused():
    with pytest.raises(ValueError, match=r"`send=-1` of a pipeline must not be less than 0"):
        Costs(send=-1)
    with pytest.raises(ValueError, match=r"`inputs=\(1, -2\)` of a pipeline must not be less than"):
        Costs(inputs=(1, -2))


def test_shares_beyond_one_are_refused():
    with pytest.raises(ValueError, match=r"`kept=2` of a pipeline is a share: give 0 to 1"):
        Costs(kept=2)
