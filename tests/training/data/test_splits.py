"""Splits: every document in one, in proportion everywhere."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshdsl.training.data import parse_ratios, splits_of

RATIOS = st.tuples(*[st.integers(low, 1000).map(Fraction) for low in (1, 0, 0)])


@given(count=st.integers(0, 3000), start=st.integers(0, 3000), ratios=RATIOS)
def test_any_run_of_documents_is_split_in_proportion(count, start, ratios):
    found = splits_of(start + count, ratios)
    assert len(found) == start + count
    for number, ratio in enumerate(ratios):
        share = ratio / sum(ratios)
        assert abs(np.count_nonzero(found[start:] == number) - count * share) <= 6
        assert ratio or number not in found


@given(count=st.integers(0, 500), more=st.integers(0, 500), ratios=RATIOS)
def test_documents_added_at_the_end_move_no_other(count, more, ratios):
    np.testing.assert_array_equal(splits_of(count, ratios), splits_of(count + more, ratios)[:count])


def test_a_large_number_of_documents_is_split_as_asked():
    counts = np.bincount(splits_of(100_000, parse_ratios("949,50,1")), minlength=3)
    np.testing.assert_allclose(counts, [94_900, 5_000, 100], atol=4)


def test_ratios_are_two_or_three_numbers():
    assert parse_ratios("949,50,1") == (949, 50, 1)
    assert parse_ratios(" .9, 0.1") == (Fraction(9, 10), Fraction(1, 10), 0)


@pytest.mark.parametrize("text", ["", "1", "1,2,3,4", "0,1", "1,-1", "a,b", "1/0,1", "nan,1"])
def test_other_ratios_are_refused(text):
    with pytest.raises(ValueError) as error:
        parse_ratios(text)
    assert str(error.value) == (
        "needs the parts for training, validation and test, as 949,50,1, the first of them above "
        f"0; got {text!r}"
    )
