"""GPipe and 1F1B: the closed forms of their papers."""

import pytest

from meshdsl.lowering.pipelines.buffers import peaks
from meshdsl.lowering.pipelines.costs import Costs
from meshdsl.lowering.pipelines.named import named
from meshdsl.lowering.pipelines.planning import plan

SIZES = [(p, m) for p in (1, 2, 3, 4, 8) for m in (1, 2, 3, 4, 7, 8, 17)]


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize("p, m", SIZES)
def test_the_bubble_is_that_of_the_papers(name, p, m):
    planned = plan(named(name, p, m), Costs(forward=2, backward=5))
    assert planned.makespan == (m + p - 1) * (2 + 5)
    assert planned.bubbles == ((p - 1) * (2 + 5),) * p
    assert planned.bubble == pytest.approx((p - 1) / (m + p - 1))


@pytest.mark.parametrize("p, m", SIZES)
def test_gpipe_keeps_all_microbatches_and_1f1b_as_many_as_stages_follow(p, m):
    assert peaks(named("gpipe", p, m)) == (m,) * p
    assert peaks(named("1f1b", p, m)) == tuple(min(m, p - i) for i in range(p))


def test_the_backward_passes_of_gpipe_begin_with_the_last_microbatch():
    assert [str(a) for a in named("gpipe", 2, 3).rows[1]] == "1F0 1F1 1F2 1B2 1B1 1B0".split()


def test_1f1b_is_the_order_of_the_figure_in_the_paper():
    """Figure 4 (top) of Narayanan et al. 2021 has four stages and eight microbatches."""
    rows = [" ".join(str(a)[1:] for a in row) for row in named("1f1b", 4, 8).rows]
    assert rows == [
        "F0 F1 F2 F3 B0 F4 B1 F5 B2 F6 B3 F7 B4 B5 B6 B7",
        "F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 F6 B4 F7 B5 B6 B7",
        "F0 F1 B0 F2 B1 F3 B2 F4 B3 F5 B4 F6 B5 F7 B6 B7",
        "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7",
    ]
