"""Fits of laws to measurements, against laws that are known."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshdsl.layouts.fits import SIZES, Fit, kind_of

MOVED = [2**power for power in range(12, 24, 2)]
PRODUCTS = [(1, m, k, n) for m in (16, 64, 256) for k in (16, 64, 256) for n in (16, 64, 256)]
PRODUCTS += [(8, 64, 64, 64)]


def seconds_of_product(batch, rows, inner, columns):
    moved = rows * inner + inner * columns + rows * columns
    return 1e-6 + batch * (rows * inner * columns / 40e9 + moved / 10e9)


@given(st.floats(1e-7, 1e-3), st.floats(1e8, 1e12))
def test_a_law_has_the_latency_and_the_bandwidth_that_it_was_made_with(latency, bandwidth):
    fit = Fit("elementwise", {(n,): latency + n / bandwidth for n in MOVED})
    for count in (2**10, 2**13, 2**30):
        assert fit.law([count]) == pytest.approx(latency + count / bandwidth, rel=1e-3)


def test_the_law_of_products_has_their_flops_and_their_bytes():
    fit = Fit("products/float32/rows", {sizes: seconds_of_product(*sizes) for sizes in PRODUCTS})
    for sizes in [(1, 100, 30, 200), (8, 64, 64, 64), (1, 4096, 4096, 4096)]:
        assert fit.seconds(sizes) == pytest.approx(seconds_of_product(*sizes), rel=1e-3)


def test_what_was_measured_is_what_is_said_even_where_no_law_fits():
    measured = {(n,): abs(math.sin(n)) + 0.1 for n in MOVED}
    fit = Fit("elementwise", measured)
    for sizes, seconds in measured.items():
        assert fit.seconds(sizes) == pytest.approx(seconds)
    low, middle, high = (fit.seconds([n]) / fit.law([n]) for n in (2**12, 2**13, 2**14))
    assert min(low, high) < middle < max(low, high)


def test_beyond_the_largest_size_the_law_goes_on():
    fit = Fit("elementwise", {(n,): (1 + (n > 2**20)) * n / 1e9 for n in MOVED})
    last = MOVED[-1]
    assert fit.seconds([8 * last]) == pytest.approx(8 * fit.seconds([last]), rel=1e-6)


def test_no_factor_is_negative():
    falling = {(n,): 1 / n for n in MOVED}
    assert min(Fit("elementwise", falling).factors) >= 0


def test_a_point_that_is_left_out_is_taken_from_the_others():
    measured = {(n,): n / 1e9 for n in MOVED} | {(2**16,): 1.0}
    fit = Fit("elementwise", measured)
    assert fit.seconds((2**16,)) == pytest.approx(1.0)
    assert fit.left_out((2**16,)) == pytest.approx(2**16 / 1e9, rel=1e-3)
    assert Fit("elementwise", {(4,): 2.0}).left_out((4,)) == 2.0


def test_the_first_word_of_a_name_decides_the_sizes():
    assert SIZES[kind_of("products/float32/rows")] == ("batch", "rows", "inner", "columns")
    assert SIZES[kind_of("all_reduce")] == ("devices", "payload bytes")
