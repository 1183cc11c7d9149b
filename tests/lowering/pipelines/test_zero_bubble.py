"""ZB-H1 and ZB-V: the closed forms of Qi et al. 2023."""

import itertools

import pytest

from meshdsl.lowering.pipelines.buffers import peaks
from meshdsl.lowering.pipelines.costs import Costs
from meshdsl.lowering.pipelines.named import named
from meshdsl.lowering.pipelines.planning import plan


@pytest.mark.parametrize("p, extra", [*itertools.product((1, 2, 3, 4, 6), (0, 1, 5))])
def test_zb_h1_has_the_bubble_of_table_2(p, extra):
    m = p + extra
    for f, i, w in [(1, 1, 1), (2, 2, 1), (3, 2, 2), (2, 3, 1), (2, 3, 2), (1, 1, 0)]:
        planned = plan(named("zb-h1", p, m), Costs(forward=f, inputs=i, weights=w))
        assert planned.bubbles == ((p - 1) * (f + i - w),) * p


def test_the_bubble_of_zb_h1_is_a_third_of_that_of_1f1b():
    third, full = plan(named("zb-h1", 8, 24)), plan(named("1f1b", 8, 24))
    assert third.bubbles[0] * 3 == full.bubbles[0] == 21


@pytest.mark.parametrize("p, m", [*itertools.product((1, 2, 3, 4, 6), (1, 2, 5, 6, 13))])
def test_zb_h1_keeps_as_many_microbatches_on_each_stage(p, m):
    assert peaks(named("zb-h1", p, m)) == (min(m, p),) * p


def test_what_w_needs_is_less_than_what_i_needs():
    """Stage i of ZB-H1 has p - i microbatches before `I`, and i of which only `W` is to come."""
    planned = plan(named("zb-h1", 4, 12), Costs(kept=0.25))
    assert planned.peaks == tuple(4 - i + 0.25 * i for i in range(4))


@pytest.mark.parametrize("p, extra", [*itertools.product((1, 2, 3, 4, 6), (0, 1, 7))])
def test_no_stage_of_zbv_waits_once_it_has_begun(p, extra):
    m = 2 * p - 1 + extra
    planned = plan(named("zbv", p, m))
    assert planned.pauses == (0,) * p
    assert planned.makespan == 6 * m + p - 1
    assert [row[0].start for row in planned.spans] == [*range(p)]


@pytest.mark.parametrize("p, m", [*itertools.product((1, 2, 3, 4, 6), (1, 2, 5, 13))])
def test_zbv_keeps_no_more_than_two_half_chunks_per_stage(p, m):
    most = peaks(named("zbv", p, m))
    assert all(count <= min(2 * p, 2 * m) for count in most)
    if m >= 2 * p:
        assert most == (2 * p,) * p


def test_the_chunks_of_zbv_go_down_and_up():
    assert named("zbv", 4, 3).placement == (0, 1, 2, 3, 3, 2, 1, 0)
