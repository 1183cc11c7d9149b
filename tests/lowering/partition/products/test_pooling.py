"""Pooling on split dims: only what windows reach beyond a shard is sent, backwards as well."""

import pytest

import meshdsl as md
from tests.lowering.plans import collectives, lowered
from tests.ops.agreement import random

batch, height, width = md.dims(batch=4, height=16, width=8)
X = random([batch, height, width])
ROW = 4 * 8 * 8  # bytes of one row of one device


def halo_bytes(function, layout="height:x", mesh="x:4"):
    found = lowered(function, X, layout=layout, mesh=mesh).collectives
    assert {c.kind for c in found} <= {"permute", "all_reduce"}
    return sum(c.payload_bytes for c in found if c.kind == "permute")


def total(pool):
    return lambda x: md.sum(md.sin(pool(x)))


@pytest.mark.parametrize("pool", [md.max_pool, md.avg_pool])
@pytest.mark.parametrize("layout", ["height:x", "batch:x", "height:x; width:y", "width:x"])
def test_windows_side_by_side_need_nothing_of_their_neighbours(pool, layout):
    def both(x):
        return md.value_and_grad(total(lambda x: pool(x, {"height": 2, "width": 2})))(x)

    found = collectives(both, X, layout=layout, mesh="x:4,y:2")
    assert [line.split()[0] for line in found] == ["all_reduce"]


def test_the_maximum_sends_its_boundary_once_and_what_it_hands_out_once():
    def pool(x):
        return md.max_pool(x, {"height": 3}, 1, "same")

    assert halo_bytes(pool) == 2 * ROW
    # Backwards the same rows again count equals; then go the maximum and its shares.
    assert halo_bytes(md.grad(total(pool))) == (2 + 2 * 2) * ROW


def test_the_mean_sends_its_boundary_each_way():
    def pool(x):
        return md.avg_pool(x, {"height": 3}, 1, "same")

    assert halo_bytes(pool) == 2 * ROW
    assert halo_bytes(md.grad(total(pool))) == 4 * ROW


@pytest.mark.parametrize("method", ["nearest", "linear"])
def test_upsampling_sends_one_row_to_each_side_at_most(method):
    found = halo_bytes(lambda x: md.upsample(x, {"height": 2}, method))
    assert found == (2 * ROW if method == "linear" else 0)
