"""Tables of costs: what they say at their own sizes, between them and beyond them."""

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshdsl.layouts import costs
from meshdsl.layouts.costs import (
    ATTENTION,
    ATTENTION_BLOCKS,
    COLLECTIVES,
    ELEMENTWISE,
    GRADIENT,
    PRODUCTS,
    SCORES,
    costs_of,
    visible_scores,
)
from meshdsl.layouts.hardware import HARDWARE, hardware

TABLES = ("v4", "v5e", "v5p", "v6e")
GPUS = ("a100", "h100", "h200", "b200")


@pytest.mark.parametrize("name", TABLES)
def test_a_table_says_what_stands_in_it(name):
    table, kind = costs_of(name), hardware(name)
    text = json.loads(costs.path_of(name).read_text())
    assert text["hardware"] == name and text["origin"] == table.origin
    assert table.origin.startswith("estimated_cycles of libtpu ")
    rows = text["families"][PRODUCTS]
    assert len(rows) >= 300
    for *sizes, cycles in rows:
        assert table.product(*sizes) * kind.clock == pytest.approx(cycles)
    for size, cycles in text["families"][ELEMENTWISE]:
        assert table.moved(ELEMENTWISE, size) * kind.clock == pytest.approx(cycles)


@pytest.mark.parametrize("name", TABLES)
def test_a_table_has_each_operation_once_and_none_that_nobody_asks_for(name):
    families = json.loads(costs.path_of(name).read_text())["families"]
    attention = (ATTENTION_BLOCKS, SCORES)
    expected = {PRODUCTS, ELEMENTWISE, *attention, *(GRADIENT[family] for family in attention)}
    assert set(families) == expected
    for rows in families.values():
        assert len({tuple(sizes) for *sizes, _ in rows}) == len(rows)
    assert costs_of(name).origin.endswith(f" {sum(map(len, families.values()))} operations")


@pytest.mark.parametrize("name", TABLES)
def test_no_product_is_faster_than_the_peak(name):
    table, kind = costs_of(name), hardware(name)
    for size in (1024, 2048, 8192):
        flops = 2 * size**3
        assert table.product(size, size, size) >= 0.99 * flops / kind.flops[2]


def test_between_sizes_the_cost_lies_between():
    table = costs_of("v5p")
    low, high = (table.product(n, 2048, 2048) for n in (1024, 2048))
    assert low < table.product(1500, 2048, 2048) < high
    low, high = (table.moved(ELEMENTWISE, 2**n) for n in (20, 22))
    assert low < table.moved(ELEMENTWISE, 2**21) < high


def test_beyond_the_sizes_of_a_table():
    table = costs_of("v5p")
    largest = table.product(8192, 8192, 8192)
    assert table.product(16384, 16384, 8192) == pytest.approx(4 * largest, rel=1e-6)
    assert table.product(1, 64, 64) == table.product(64, 64, 64)  # it is padded
    assert table.moved(ELEMENTWISE, 8) == table.moved(ELEMENTWISE, 2**14)


def test_a_batch_of_products_starts_once():
    table = costs_of("v5p")
    alone, many = table.product(64, 64, 64), table.product(64, 64, 64, batch=100)
    assert alone < many < 2 * alone
    large = table.product(4096, 4096, 4096)
    assert 9 * large < table.product(4096, 4096, 4096, batch=10) <= 10 * large


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("gradient", [False, True])
def test_attention_takes_its_visible_blocks(name, gradient):
    table, kind = costs_of(name), hardware(name)
    text = json.loads(costs.path_of(name).read_text())["families"]
    family = GRADIENT[ATTENTION_BLOCKS] if gradient else ATTENTION_BLOCKS
    for side, features, cycles in text[family]:
        length = 3 * side  # of which the table's blocks are the largest
        full = table.attention(8, length, length, features, gradient=gradient)
        causal = table.attention(8, length, length, features, causal=True, gradient=gradient)
        assert full * kind.clock == pytest.approx(8 * 9 * cycles)
        assert causal * kind.clock == pytest.approx(8 * 6 * cycles)
        flops = 2 * (5 if gradient else 2) * 8 * length**2 * features
        assert full > flops / kind.flops[2]


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("gradient", [False, True])
def test_scores_in_blocks_take_what_the_table_says(name, gradient):
    table, kind = costs_of(name), hardware(name)
    text = json.loads(costs.path_of(name).read_text())["families"]
    for side, features, cycles in text[GRADIENT[SCORES] if gradient else SCORES]:
        seconds = table.scores(5 * side**2, side, side, features, gradient=gradient)
        assert seconds * kind.clock == pytest.approx(5 * cycles)
        # Vectors of scores take longer than their products.
        assert seconds > 2 * (5 if gradient else 2) * 5 * side**2 * features / kind.flops[2]


@pytest.mark.parametrize("name", TABLES)
def test_blocks_of_a_few_rows_are_not_in_a_table(name):
    """Their time is that of the keys that are read."""
    assert costs_of(name).scores(2**22, 1, 512, 128) is None
    assert costs_of(name).scores(2**22, 512, 63, 128) is None


def test_gpus_have_no_table_of_scores():
    assert costs_of("h100").scores(2**22, 512, 512, 128) is None


@pytest.mark.parametrize("name", TABLES)
def test_few_features_are_padded_in_a_kernel(name):
    table = costs_of(name)
    for gradient in (False, True):
        few, least = (table.attention(8, 512, 512, n, gradient=gradient) for n in (16, 64))
        assert few == least


@pytest.mark.parametrize("name", GPUS)
def test_no_kernel_of_a_gpu_is_shorter_than_the_shortest_one(name):
    table = costs_of(name)
    rows = json.loads(costs.path_of(name).read_text())["families"][ATTENTION]
    shortest = min(row[-1] for row in rows) / 1e9
    for gradient in (False, True):
        tiny = table.attention(1, 8, 8, 16, causal=True, gradient=gradient)
        assert tiny == pytest.approx(shortest)
    # But few long sequences take less than many: they fill a device as well.
    few, many = (table.attention(n, 16384, 16384, 128, causal=True) for n in (4, 16))
    assert few == pytest.approx(many / 4)


@pytest.mark.parametrize("name", GPUS)
@pytest.mark.parametrize("gradient", [False, True])
def test_more_scores_do_not_take_a_gpu_less_time(name, gradient):
    table = costs_of(name)

    def seconds(matrices, length):
        return table.attention(matrices, length, length, 128, causal=True, gradient=gradient)

    lengths = [2**n for n in range(6, 16)] + [3 * 2**n for n in range(5, 14)]
    for matrices in (1, 8, 40, 512):
        times = [seconds(matrices, length) for length in sorted(lengths)]
        assert times == sorted(times)
    for length in (512, 3000, 20000):
        times = [seconds(matrices, length) for matrices in (1, 2, 12, 16, 48, 64, 100, 256, 1000)]
        assert times == sorted(times)


@pytest.mark.parametrize("name", GPUS)
def test_gradients_beyond_their_sizes_are_slower_than_the_forward_pass(name):
    table = costs_of(name)
    for matrices, length in [(16, 512), (16, 1024), (64, 1024), (256, 4096), (1024, 8192)]:
        forward, backward = (
            table.attention(matrices, length, length, 128, causal=True, gradient=gradient)
            for gradient in (False, True)
        )
        assert 1.5 < backward / forward < 5  # of 2.5 times its flops


def test_no_kernel_fits_lengths_between_blocks():
    assert costs_of("v5p").attention(8, 1000, 1024, 128) is None


@given(
    st.integers(1, 40),
    st.integers(1, 40),
    st.integers(1, 9),
    st.integers(1, 9),
    st.booleans(),
    st.none() | st.integers(1, 30),
)
def test_the_visible_scores_are_those_of_blocks_with_one(rows, columns, high, wide, causal, window):
    """Pads are computed like other scores."""
    padded = -(-rows // high) * high, -(-columns // wide) * wide
    row, column = np.indices(padded)
    hidden = np.zeros(padded, bool)
    if causal:
        hidden |= column > row
    if window is not None:
        hidden |= np.abs(row - column) >= window
    shown = 0
    for i in range(0, rows, high):
        for j in range(0, columns, wide):
            block = hidden[i : i + high, j : j + wide]
            shown += block.size * (not block.all())
    assert visible_scores(rows, columns, high, wide, causal, window) == shown


def test_other_peaks_scale_what_a_table_says():
    table = costs_of("v5p")
    faster = replace(table.hardware, flops={2: 2 * 459e12}, memory_bandwidth=2 * 2765e9)
    twice = table.on(faster)
    assert twice.product(4096, 4096, 4096) == pytest.approx(table.product(4096, 4096, 4096) / 2)
    assert twice.moved(ELEMENTWISE, 2**24) == pytest.approx(table.moved(ELEMENTWISE, 2**24) / 2)


@pytest.mark.parametrize("name", GPUS)
def test_a_table_of_a_gpu_says_what_stands_in_it(name):
    table = costs_of(name)
    text = json.loads(costs.path_of(name).read_text())
    assert text["hardware"] == name and text["unit"] == "nanoseconds"
    assert "aiconfigurator" in table.origin and "cudnn-frontend" in table.origin
    families = text["families"]
    gradient = GRADIENT[ATTENTION]
    assert set(families) == {PRODUCTS, ELEMENTWISE, ATTENTION, gradient, *COLLECTIVES}
    for *sizes, time in families[PRODUCTS]:
        assert table.product(*sizes) * 1e9 == pytest.approx(time)
    for size, time in families[ELEMENTWISE]:
        assert table.moved(ELEMENTWISE, size) * 1e9 == pytest.approx(time)
    for family in (ATTENTION, gradient):
        for matrices, length, features, time in families[family]:
            sizes = matrices, length, length, features
            seconds = table.attention(*sizes, causal=True, gradient=family == gradient)
            assert seconds * 1e9 == pytest.approx(time)
    for kind in COLLECTIVES:
        for devices, payload, time in families[kind]:
            assert table.collective(kind, devices, payload) * 1e9 == pytest.approx(time)


@pytest.mark.parametrize("name", GPUS)
def test_measured_operations_lie_between_the_peaks_and_half_of_them(name):
    table, kind = costs_of(name), hardware(name)
    for size in (4096, 8192, 16384):
        assert 0.5 < 2 * size**3 / kind.flops[2] / table.product(size, size, size) < 1
    assert 0.6 < 2**27 / kind.memory_bandwidth / table.moved(ELEMENTWISE, 2**27) < 1
    sent = 2**30 * 7 / 8
    assert 0.6 < sent / kind.link_bandwidth / table.collective("all_gather", 8, 2**30) < 1
    for gradient, flops in ((False, 2), (True, 5)):
        seconds = table.attention(64, 8192, 8192, 128, causal=True, gradient=gradient)
        assert 0.4 < flops * 64 * 8192**2 * 128 / kind.flops[2] / seconds < 0.9


def test_a_small_collective_takes_as_long_as_the_smallest_one():
    table = costs_of("h100")
    assert table.collective("all_reduce", 8, 8) == table.collective("all_reduce", 8, 1024)
    assert table.collective("permute", 8, 1024) is None  # NCCL's transfers are not in it
    three = table.collective("all_gather", 3, 2**26)
    low, high = (table.collective("all_gather", n, 2**26) for n in (2, 4))
    assert low < three < high


def test_hardware_without_a_table_has_no_costs():
    assert {name for name in HARDWARE if costs_of(name) is not None} == {*TABLES, *GPUS}


def test_a_table_of_another_format_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(costs, "_FOLDER", tmp_path)
    costs._read.cache_clear()
    (tmp_path / "v3.json").write_text(json.dumps({"format": 1, "hardware": "v3"}))
    with pytest.raises(ValueError, match=r"v3\.json: format 1, this version reads 2"):
        costs_of("v3")
    rows = {ELEMENTWISE: [[16384, 2000]], PRODUCTS: [[64, 64, 64, 9]]}
    text = costs.to_json("v3", "here", rows)
    (tmp_path / "v3.json").write_text(text)
    assert costs_of("v3").origin == "here"
    assert costs_of("v3").moved(ELEMENTWISE, 16384) * hardware("v3").clock == pytest.approx(2000)
    costs._read.cache_clear()
