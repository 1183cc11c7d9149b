"""Prices of collectives: what `Hardware.seconds` says, from two calls of it."""

import pickle
from dataclasses import replace
from itertools import combinations

import pytest

from meshdsl.layouts.hardware import COLLECTIVES, hardware
from meshdsl.layouts.mesh import Mesh
from meshdsl.layouts.prices import LinkPrices

MESHES = ("data:4,model:8", "slice@dcn:2,data:3,model:4", "a:2,one:1,b:16", "wide:512,model:4")


@pytest.mark.parametrize("name", ["v5e", "v5p", "h100", "cpu"])
@pytest.mark.parametrize("mesh", MESHES)
def test_a_price_is_the_time_of_any_collective(name, mesh):
    known, where = hardware(name), Mesh.parse(mesh)
    prices = LinkPrices.on(known, where)
    for kind in COLLECTIVES:
        for count in range(1, len(where.axes) + 1):
            for axes in combinations(where.names, count):
                if where.extent(axes) == 1:  # nothing is sent
                    continue
                for sent in (1, 10**4, 10**6, 10**9):
                    seconds = known.seconds(kind, sent, axes, where)
                    cost = prices.cost(kind, axes, sent) / known.link_bandwidth
                    assert cost <= 1.01 * seconds, (kind, axes, sent)
                    # Between latency and bandwidth of two networks in turn, it is less.
                    turns = known.torus and not known.slow_axes(where).isdisjoint(axes)
                    # Prices per byte are rounded to 1/1024.
                    assert cost >= (0.5 if turns else 0.99) * seconds, (kind, axes, sent)


def test_nothing_costs_nothing():
    mesh = Mesh.parse("data:2,one:1")
    prices = LinkPrices.on(hardware("v5p"), mesh)
    assert prices.cost("all_reduce", ["data"], 0) == 0
    assert prices.price("all_gather", ["one"]).least == 0


def test_no_collective_along_some_axes_is_cheaper_per_byte_than_the_lowest_price():
    mesh = Mesh.parse("slice@dcn:2,data:4,model:4")
    prices = LinkPrices.on(hardware("v5p"), mesh)
    for axes in (["data"], ["data", "model"], ["slice", "model"], mesh.names):
        among = [
            (kind, one) for n in (1, 2, 3) for one in combinations(axes, n) for kind in COLLECTIVES
        ]
        least = min(prices.price(kind, one).parts for kind, one in among)
        assert prices.lowest(axes) == least


def test_a_mesh_with_prices_is_another_one_and_reads_as_before():
    mesh = Mesh.parse("slice@dcn:2,data:4")
    priced = replace(mesh, prices=LinkPrices.on(hardware("v5p"), mesh))
    assert priced != mesh and str(priced) == str(mesh) and repr(priced) == repr(mesh)
    again = pickle.loads(pickle.dumps(priced))
    assert again == priced and hash(again) == hash(priced)
    assert pickle.loads(pickle.dumps(mesh)) == mesh
