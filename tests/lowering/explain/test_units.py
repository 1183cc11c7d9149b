"""Bytes and counts as people read them."""

import pytest

from meshdsl.lowering.explain.units import show_bytes, show_count, show_flops


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
