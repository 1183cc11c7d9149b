"""Look-ups: the table stays where it is."""

import numpy as np
import pytest

import meshdsl as md
from tests.lowering.plans import collectives
from tests.ops.agreement import random

vocab, embed, batch, length = md.dims(vocab=24, embed=16, batch=8, length=4)
TOKENS = np.random.default_rng(0).integers(-2, 26, (8, 4)).astype(np.int32)


def look_up(table, tokens):
    return md.take(table, tokens, "vocab")


def gradient(table, tokens):
    return md.grad(lambda t: md.sum(md.sin(look_up(t, tokens))))(table)


def plan(function, layout, vocab=vocab):
    tokens = md.named(TOKENS, [batch, length])
    return collectives(function, random([vocab, embed]), tokens, layout=layout)


@pytest.mark.parametrize(
    "layout", ["embed:model", "batch:data", "batch:data; embed:model", "length:model"]
)
def test_a_table_with_all_its_rows_is_read_locally(layout):
    assert plan(look_up, layout) == []


@pytest.mark.parametrize("layout", ["vocab:model", "vocab:model; batch:data"])
def test_a_table_split_over_its_rows_costs_one_reduction(layout):
    assert plan(look_up, layout) == ["all_reduce model [batch=8, length=4, embed=16]"]


def test_a_result_wanted_split_is_reduce_scattered():
    assert plan(look_up, "vocab:model; length:model?", md.Dimension("vocab", 64)) == [
        "all_gather model [batch=8, length=4]",
        "reduce_scatter model [batch=8, length=4, embed=16]",
    ]


def test_a_table_smaller_than_the_result_is_gathered():
    assert plan(look_up, "vocab:model; length:model?") == ["all_gather model [vocab=24, embed=16]"]


def test_the_gradient_of_each_row_is_added_up_where_the_row_is():
    assert plan(gradient, "vocab:model") == ["all_reduce model [batch=8, length=4, embed=16]"]
    assert plan(gradient, "embed:model; batch:data") == ["all_reduce data [vocab=24, embed=16]"]


def test_one_hot_is_local_on_every_layout():
    tokens = md.named(TOKENS, [batch, length])
    for layout in ("vocab:model", "vocab:model+data", "batch:data; vocab:model", "length:model"):
        found = collectives(lambda t: md.one_hot(t, vocab, "float64"), tokens, layout=layout)
        assert found == []


def test_dims_that_pair_up_stay_split():
    logits, labels = random([batch, vocab]), md.named(TOKENS[:, 0], [batch])
    for layout, expected in [
        ("batch:data", []),
        ("vocab:model; batch:data", ["all_reduce model [batch=8]"]),
    ]:
        found = collectives(lambda x, i: md.take(x, i, "vocab"), logits, labels, layout=layout)
        assert found == expected


def test_looking_along_a_split_dim_moves_the_cheaper_side():
    x = random([batch, vocab])
    few = md.named(TOKENS, [batch, "vocab"])
    many = md.named(np.tile(TOKENS, 6), [batch, vocab])

    def along(x, i):
        return md.take_along(x, i, "vocab")

    assert collectives(along, x, few, layout="vocab:model") == [
        "all_gather model [batch=8, vocab=4]",
        "reduce_scatter model [batch=8, vocab=4]",
    ]
    assert (
        collectives(along, x, many, layout="vocab:model")
        == ["all_to_all model [batch=8, vocab=24]"] * 3
    )


def test_a_scatter_into_a_split_dim_is_local():
    x, tokens = random([batch, vocab]), md.named(TOKENS, [batch, length])
    for mode in ("set", "add", "max", "min"):
        found = collectives(
            lambda x, i: md.scatter(x, i, 1.0, "vocab", mode),  # noqa: B023
            *(x, tokens),
            layout="vocab:model; batch:data",
        )
        assert found == ["all_reduce model [batch=8, length=4]"] * (mode == "set")


def test_split_updates_leave_partial_results():
    x, items = random([vocab]), md.named(TOKENS[:, 0], [batch])
    for mode, reductions in (("add", 1), ("max", 1), ("set", 2)):
        found = collectives(
            lambda x, i: md.scatter(x, i, 1.0, "vocab", mode),  # noqa: B023
            *(x, items),
            layout="batch:data",
        )
        assert found == ["all_reduce data [vocab=24]"] * reductions


def test_one_update_or_updates_that_differ_settle_nothing():
    """Where several may meet, the devices tell each other which of them counts."""
    table, one = random([vocab, embed]), random([embed], seed=1)
    several = random([md.Dimension("k", 3), embed], seed=2)
    at = md.named(np.array(5, np.int32), [])
    places = md.named(np.array([5, 1, 5], np.int32), ["k"])

    def ramp(x, u, at):
        return md.scatter(x, md.arange(md.Dimension("k", 3)) + at, u, "vocab")

    def put(x, u, at):
        return md.scatter(x, at, u, "vocab")

    assert collectives(put, table, one, at, layout="vocab:model") == []
    assert collectives(ramp, table, several, at, layout="vocab:model") == []
    settled = collectives(put, table, several, places, layout="vocab:model")
    assert settled == ["all_reduce model [k=3]"]


def test_each_row_of_a_batch_has_one_update():
    table, updates = random([batch, vocab]), random([batch], seed=1)
    at = md.named((np.arange(batch.size) % (vocab.size + 1)).astype(np.int32), [batch])
    found = collectives(
        lambda x, u, at: md.scatter(x, at, u, "vocab"), table, updates, at, layout="vocab:model"
    )
    assert found == []
