"""What `--data` says."""

from fractions import Fraction

import pytest

from meshdsl.training.data import parse_entries
from meshdsl.training.data.entries import Entry


def test_patterns_without_weights_are_taken_together():
    assert parse_entries("a/*.txt, b.bin,,") == [Entry(("a/*.txt", "b.bin"))]
    assert parse_entries(None) == parse_entries(" ") == [Entry(())]


def test_a_number_after_a_colon_is_a_weight_and_any_other_colon_belongs_to_the_name():
    assert parse_entries("a:0.7,c:/b/*.txt:.3, d:2") == [
        Entry(("a",), Fraction(7, 10)),
        Entry(("c:/b/*.txt",), Fraction(3, 10)),
        Entry(("d",), Fraction(2)),
    ]
    assert parse_entries("c:/b.txt") == [Entry(("c:/b.txt",))]


def test_weights_are_for_all_and_above_zero():
    with pytest.raises(ValueError) as error:
        parse_entries("a:0.7,b.txt,c:0.0")
    assert str(error.value) == (
        "`b.txt` has no weight, but others have: write `b.txt:1`, say; "
        "`c` has the weight 0: leave it out"
    )
