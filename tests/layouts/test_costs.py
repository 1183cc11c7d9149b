"""Tables of costs: what they say at their own sizes, between them and beyond them."""

import json

import pytest

from meshdsl.layouts import costs
from meshdsl.layouts.costs import ELEMENTWISE, PRODUCTS, costs_of
from meshdsl.layouts.hardware import HARDWARE, hardware

TABLES = ("v4", "v5e", "v5p", "v6e")


@pytest.mark.parametrize("name", TABLES)
def test_a_table_says_what_stands_in_it(name):
    table, kind = costs_of(name), hardware(name)
    text = json.loads(costs.path_of(name).read_text())
    assert text["hardware"] == name and text["origin"] == table.origin
    assert table.origin.startswith("estimated_cycles of libtpu ")
    rows = text["cycles"][PRODUCTS]
    assert len(rows) >= 300
    for *sizes, cycles in rows:
        assert table.product(*sizes) * kind.clock == pytest.approx(cycles)
    for size, cycles in text["cycles"][ELEMENTWISE]:
        assert table.moved(ELEMENTWISE, size) * kind.clock == pytest.approx(cycles)


@pytest.mark.parametrize("name", TABLES)
def test_a_table_has_each_operation_once_and_none_that_nobody_asks_for(name):
    cycles = json.loads(costs.path_of(name).read_text())["cycles"]
    assert set(cycles) == {PRODUCTS, ELEMENTWISE}
    for rows in cycles.values():
        assert len({tuple(sizes) for *sizes, _ in rows}) == len(rows)
    assert costs_of(name).origin.endswith(f" {sum(map(len, cycles.values()))} operations")


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


def test_hardware_without_a_table_has_no_costs():
    assert {name for name in HARDWARE if costs_of(name) is not None} == {*TABLES}


def test_a_table_of_another_format_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(costs, "_FOLDER", tmp_path)
    costs._read.cache_clear()
    (tmp_path / "v3.json").write_text(json.dumps({"format": 2, "hardware": "v3"}))
    with pytest.raises(ValueError, match=r"v3\.json: format 2, this version reads 1"):
        costs_of("v3")
    rows = {ELEMENTWISE: [[16384, 2000]], PRODUCTS: [[64, 64, 64, 9]]}
    text = costs.to_json("v3", "here", rows)
    (tmp_path / "v3.json").write_text(text)
    assert costs_of("v3").origin == "here"
    assert costs_of("v3").moved(ELEMENTWISE, 16384) * hardware("v3").clock == pytest.approx(2000)
    costs._read.cache_clear()
