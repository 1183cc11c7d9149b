"""Sorting: a dim is made whole the cheapest way; of the largest, only candidates move."""

import numpy as np
import pytest

import meshdsl as md
from tests.lowering.plans import collectives
from tests.ops.agreement import random

batch, length = md.dims(batch=8, length=32)
X = random([batch, length])


def test_a_whole_dim_is_sorted_locally():
    for layout in ("batch:data", "batch:data+model"):
        assert collectives(lambda x: md.sort(x, "length"), X, layout=layout) == []
        assert collectives(lambda x: md.top_k(x, 3, "length", "k"), X, layout=layout) == []


def test_another_dim_takes_the_axis_while_sorting():
    found = collectives(lambda x: md.sort(x, "length"), X, layout="length:model; batch:data")
    assert found == ["all_to_all model [batch=8, length=32]"] * 2


def test_without_another_dim_everything_is_gathered():
    found = collectives(lambda x: md.sort(x, "length"), random([length]), layout="length:model")
    assert found == ["all_gather model [length=32]"]


def sent(k):
    """Each device merges the candidates of all for its share of the rows."""
    there = [f"all_to_all model [candidates_={min(4 * k, 32)}, elements_=8]"] * 2
    return [*there, *[f"all_gather model [k={k}, elements_=8]"] * 2]


def test_the_candidates_of_each_device_go_to_those_who_merge_them():
    found = collectives(
        lambda x: md.top_k(x, 3, "length", "k"), X, layout="length:model; batch:data"
    )
    assert found == sent(3)


def test_candidates_of_fewer_rows_than_devices_are_gathered():
    x = random([md.Dimension("batch", 1), length])
    found = collectives(lambda x: md.top_k(x, 3, "length", "k"), x, layout="length:model")
    assert found == ["all_gather model [candidates_=12, batch=1]"] * 2


def test_of_whole_shards_only_the_elements_move():
    for k in (8, 20):
        found = collectives(lambda x: md.top_k(x, k, "length", "k"), X, layout="length:model")  # noqa: B023
        there = "all_to_all model [length=32, elements_=8]"
        merged = [there, *[f"all_gather model [k={k}, elements_=8]"] * 2]
        assert found == (merged if k == 8 else ["all_gather model [length=32, batch=8]"])
        found = collectives(
            lambda x: md.top_k(x, k, "length", "k"),  # noqa: B023 - called at once
            random([length]),
            layout="length:model",
        )
        assert found == ["all_gather model [length=32]"]


@pytest.mark.parametrize("k", [3, 20])
@pytest.mark.parametrize("axes", ["model+one", "one+model", "one"])
def test_an_axis_of_one_device_changes_nothing(axes, k):
    for x in (X, random([length])):
        found, alone = (
            collectives(
                lambda x: md.top_k(x, k, "length", "k"), x, layout=layout, mesh="model:4,one:1"
            )
            for layout in (f"length:{axes}", "length:model" if "model" in axes else "length:-")
        )
        assert [c.split(" ")[0] for c in found] == [c.split(" ")[0] for c in alone]


@pytest.mark.parametrize(("size", "k"), [(30, 3), (30, 8), (30, 9), (30, 30), (2, 2), (5, 1)])
def test_ties_pads_and_nan_are_those_of_one_device(size, k):
    values = np.arange(size * 8).reshape(size, 8) % 5 * 1.0
    values[::3, 1], values[::2, 2] = np.nan, -np.inf
    dims = md.dims(length=size, batch=8)
    for x in (md.named(values, dims), md.named(values[:, 1], dims[:1])):

        def largest(x):
            return md.top_k(x, k, "length", "k")

        single = md.jit(largest, backend="numpy")(x)
        split = md.jit(largest, mesh="model:4", layout="length:model", backend="numpy")(x)
        for one, other in zip(single, split, strict=True):
            np.testing.assert_array_equal(one, other)


def test_the_gradient_goes_back_to_where_the_element_is():
    found = collectives(
        lambda x: md.grad(lambda x: md.sum(md.sin(md.top_k(x, 3, "length", "k")[0])))(x),
        X,
        layout="length:model",
    )
    assert found == sent(3)
