"""Groups of microbatches: sizes, and the order of a stage with several chunks."""

import pytest

from meshdsl.lowering.pipelines.groups import depth_first, fewest_live, fewest_ticks, group_sizes


@pytest.mark.parametrize("m", range(1, 30))
@pytest.mark.parametrize("p", [1, 2, 3, 8])
def test_groups_are_no_smaller_or_no_larger_than_the_number_of_stages(p, m):
    large, small = group_sizes(m, fewest_ticks(p, m)), group_sizes(m, fewest_live(p, m))
    assert sum(large) == sum(small) == m
    assert min(large) >= min(p, m) and max(large) - min(large) <= 1
    assert max(small) <= p and max(small) - min(small) <= 1
    if m % p == 0:
        assert large == small == (p,) * (m // p)


def test_a_group_goes_through_all_rounds_before_the_next_one():
    assert depth_first(5, 2, 2) == [
        *[(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)],
        *[(0, 3), (0, 4), (1, 3), (1, 4)],
    ]
