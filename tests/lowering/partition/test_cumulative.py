"""Cumulative operations: the elements stay, one total per device moves."""

import pytest

import meshdsl as md
from tests.lowering.plans import collectives, lowered
from tests.ops.agreement import random

batch, length = md.dims(batch=8, length=16)
X = random([batch, length])
NAMES = ["cumsum", "cumprod", "cummax", "cummin"]


@pytest.mark.parametrize("name", NAMES)
def test_totals_go_to_those_who_combine_them_and_back(name):
    found = collectives(
        lambda x: getattr(md, name)(x, "length"), X, layout="length:model; batch:data"
    )
    there = ["all_to_all model [devices_=4, elements_=8]"]
    assert found == (there + there) * (2 if name == "cumprod" else 1)  # with exponents


@pytest.mark.parametrize("name", ["cumsum", "cummax", "cummin"])
def test_totals_of_two_devices_are_gathered(name):
    found = collectives(
        lambda x: getattr(md, name)(x, "length"), X, layout="length:data; batch:model"
    )
    assert found == ["all_gather data [devices_=2, batch=8]"]


def test_totals_of_fewer_elements_than_devices_are_gathered():
    x = random([md.Dimension("batch", 1), length])
    found = collectives(lambda x: md.cumsum(x, "length"), x, layout="length:model")
    assert found == ["all_gather model [devices_=4, batch=1]"]


def test_several_axes_are_one_move():
    found = collectives(lambda x: md.cumsum(x, "length"), X, layout="length:model+data")
    assert found == ["all_to_all model+data [devices_=8, elements_=8]"] * 2


def test_a_recurrence_moves_its_states_and_its_scaled_decays():
    found = collectives(
        lambda x: md.linear_recurrence(md.sin(x), x, "length"), X, layout="length:model"
    )
    assert found == ["all_to_all model [devices_=4, elements_=8]"] * 4


@pytest.mark.parametrize("name", NAMES)
def test_a_whole_dim_costs_nothing(name):
    assert collectives(lambda x: getattr(md, name)(x, "length"), X, layout="batch:data") == []


def test_partial_sums_stay_partial_through_a_cumsum():
    """The contraction's sum is reduced once, when it has become small."""
    weights = random([md.Dimension("embed", 8), length])
    x = random([batch, md.Dimension("embed", 8)], seed=1)

    def model(x, w):
        return md.sum(md.cumsum(md.einsum(x, w, over="embed"), "length"), "length")

    found = collectives(model, x, weights, layout="embed:model")
    assert found == ["all_reduce model [batch=8]"]


def test_an_axis_of_size_one_moves_nothing():
    program = lowered(
        lambda x: md.cumsum(x, "length"), X, layout="length:model", mesh="data:2,model:1"
    )
    assert program.collectives == ()
