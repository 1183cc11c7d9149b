"""Sorting: a dim is made whole the cheapest way; of the largest, only candidates move."""

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


def test_no_more_candidates_than_a_shard_has():
    found = collectives(lambda x: md.top_k(x, 20, "length", "k"), X, layout="length:model")
    assert found == ["all_gather model [candidates_=32, batch=8]"] * 2


def test_the_gradient_goes_back_to_where_the_element_is():
    found = collectives(
        lambda x: md.grad(lambda x: md.sum(md.sin(md.top_k(x, 3, "length", "k")[0])))(x),
        X,
        layout="length:model",
    )
    assert found == sent(3)
