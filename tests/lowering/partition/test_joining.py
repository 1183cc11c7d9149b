"""Joined tensors pass partial sums on and stay split; the bytes are in test_moves."""

import meshdsl as md
from tests.lowering.plans import collectives, lowered
from tests.ops.agreement import random

length, d_ff, embed = md.dims(length=8, d_ff=8, embed=4)
H, G = random([length, d_ff]), random([length, d_ff], seed=2)
W = random([d_ff, embed], seed=1)


def test_partial_sums_are_joined_and_added_up_once():
    def model(h, g, w):
        return md.concat([md.einsum(h, w, over="d_ff"), md.einsum(g, w, over="d_ff")], "length")

    found = collectives(model, H, G, W, layout="d_ff:model")
    assert found == ["all_reduce model [length=16, embed=4]"]

    def stacked(h, g, w):
        return md.stack([md.einsum(h, w, over="d_ff"), md.einsum(g, w, over="d_ff")], "pair")

    found = collectives(stacked, H, G, W, layout="d_ff:model; pair:data")
    assert found == ["all_reduce model [pair=2, length=8, embed=4]"]


def test_a_whole_tensor_joins_a_partial_sum():
    def model(h, w, x):
        return md.concat([md.einsum(h, w, over="d_ff"), x], "length")

    x = random([length, embed], seed=3)
    for layout in ("d_ff:model", "d_ff:model; length:data"):
        kinds = [c.kind for c in lowered(model, H, W, x, layout=layout).collectives]
        assert kinds.count("all_reduce") == 1


def test_parts_along_a_split_dim_are_fetched_together():
    x = random([md.Dimension("length", 32)])

    def model(x):
        return md.split_into(x, "length", 4)

    found = collectives(model, x, layout="length:x", mesh="x:4")
    assert found == ["permute x [length=8]"] * 3  # a quarter of a shard each, to everyone else


def test_repeated_elements_stay_where_they_are_but_at_uneven_ends():
    x = random([md.Dimension("length", 7)])

    def model(x):
        return md.sin(md.repeat(md.cos(x), "length", 3))

    found = collectives(model, x, layout="length:x", mesh="x:2")
    assert found == ["permute x [length=2]"]
    found = collectives(lambda x: md.sum(model(x)), x, layout="length:x", mesh="x:2")
    assert found == ["all_reduce x []"]  # each element is added up where it is


def test_only_the_parts_that_are_used_are_fetched():
    x = random([md.Dimension("length", 32)])
    program = lowered(lambda x: md.split_into(x, "length", 4)[1], x, layout="length:x", mesh="x:4")
    assert {c.kind for c in program.collectives} == {"permute"}
    assert program.wire_bytes == 3 * 2 * 8


def test_the_gradient_of_parts_is_one_concat():
    x = random([md.Dimension("length", 32)])

    def model(x):
        one, two = md.split_into(x, "length", 2)
        return md.sum(md.sin(one) * two)

    program = lowered(md.grad(model), x, layout="", mesh="x:1")
    ops = [i.op for i in program.block.instructions]
    assert ops.count("concat") == 1 and ops.count("window") == 2
