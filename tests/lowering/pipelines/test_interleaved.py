"""Interleaved 1F1B: the closed forms of its paper, for any number of rounds and microbatches."""

import pytest

from meshdsl.lowering.pipelines.buffers import peaks
from meshdsl.lowering.pipelines.costs import Costs
from meshdsl.lowering.pipelines.groups import fewest_ticks, group_sizes
from meshdsl.lowering.pipelines.interleaved import interleaved
from meshdsl.lowering.pipelines.named import named
from meshdsl.lowering.pipelines.planning import plan

SIZES = [(p, v) for p in (1, 2, 3, 4) for v in (2, 3, 4)]
MICROBATCHES = (1, 2, 3, 4, 5, 7, 8, 11)


@pytest.mark.parametrize("p, v", SIZES)
def test_the_bubble_is_that_of_the_paper_though_p_does_not_divide_m(p, v):
    for m in MICROBATCHES:
        planned = plan(interleaved(p, m, v), Costs(forward=1, backward=2))
        if m >= p:
            assert planned.makespan == (v * m + p - 1) * (1 + 2)
            assert planned.bubble == pytest.approx((p - 1) / (v * m + p - 1))
        else:
            assert planned.makespan == (v * p + m - 1) * (1 + 2)


@pytest.mark.parametrize("p, v", SIZES)
def test_live_chunk_inputs_are_those_of_the_closed_form(p, v):
    for m in MICROBATCHES:
        largest = group_sizes(m, fewest_ticks(p, m))[0]
        ahead = [(v - 1) * largest + 2 * (p - i) - 1 for i in range(p)]
        assert peaks(interleaved(p, m, v)) == tuple(min(v * m, a) for a in ahead)
        if m % p == 0 and m >= 2 * p:
            assert peaks(interleaved(p, m, v))[0] == (v + 1) * p - 1


def test_one_round_is_1f1b():
    assert interleaved(4, 8, 1).rows == named("1f1b", 4, 8).rows


def test_a_stage_begins_as_in_the_figure_of_the_paper():
    """Figure 4 (bottom) of Narayanan et al. 2021: four stages, two chunks each."""
    rows = [" ".join(map(str, row[:12])) for row in interleaved(4, 8, 2).rows]
    assert rows[0] == "0F0 0F1 0F2 0F3 4F0 4F1 4F2 4F3 0F4 0F5 0F6 4B0"
    assert rows[3] == "3F0 3F1 3F2 3F3 7F0 7B0 7F1 7B1 7F2 7B2 7F3 7B3"
