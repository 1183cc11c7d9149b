"""Bytes, counts and times as people read them."""

import pytest

from meshdsl.lowering.costs.units import (
    show_bytes,
    show_count,
    show_flops,
    show_seconds,
    show_share,
)


@pytest.mark.parametrize(
    ("count", "expected"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (300 * 1024, "300 KiB"),
        (6.5 * 2**20, "6.5 MiB"),
        (2**40, "1.0 TiB"),
        (5000 * 2**40, "5000 TiB"),
    ],
)
def test_bytes_have_binary_units(count, expected):
    assert show_bytes(count) == expected


def test_counts_and_flops_have_decimal_ones():
    assert show_count(999) == "999"
    assert show_count(174_600_000_000) == "174.6 B"
    assert show_flops(12) == "12 flop"
    assert show_flops(6.6e15) == "6.6 Pflop"
    assert show_flops(6.6e22) == "66,000.0 Eflop"


@pytest.mark.parametrize(
    ("count", "expected"),
    [
        (0, "0 ns"),
        (3e-9, "3 ns"),
        (1e-6, "1.0 µs"),
        (346e-6, "346 µs"),
        (0.0123, "12.3 ms"),
        (1.25, "1.2 s"),
        (59.5, "59.5 s"),
        (75.2, "1 min 15 s"),
        (7200, "120 min 0 s"),
    ],
)
def test_times_have_the_unit_that_leaves_a_whole_part(count, expected):
    assert show_seconds(count) == expected


@pytest.mark.parametrize(
    ("part", "expected"),
    [(0, "0 %"), (1, "100 %"), (0.408, "41 %"), (0.0478, "4.8 %"), (1e-9, "< 0.01 %")],
)
def test_shares_are_in_percent(part, expected):
    assert show_share(part) == expected
