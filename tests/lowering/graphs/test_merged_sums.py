"""Sums of merged dims are of their parts, so that no layout of the merged dim moves elements."""

import pytest

import meshdsl as md
from tests.lowering.plans import lowered
from tests.ops.agreement import random

MESH, LAYOUT = "model:8", "channels:model"
batch, length, channels = md.dims(batch=8, length=32, channels=64)
group, member = md.dims(group=16, member=4)
ALL = 2 * 7 / 8 * 8  # bytes of wire of an all_reduce of one number
GATHERED = 3 / 4 * batch.size * length.size * channels.size * 8


def merged(x, names=("length", "channels")):
    return md.merge(x, names, "m")


def numbers(dim):
    return md.cast(md.arange(dim), "float64")


@pytest.mark.parametrize(
    ("function", "sent"),
    [
        (lambda x: md.sum(merged(x), "m"), ALL * 8),
        (lambda x: md.sum(merged(x)), ALL),
        (lambda x: md.max(merged(x), ["batch", "m"]), ALL),
        (lambda x: md.mean(md.square(md.tanh(merged(x)) - 1)), ALL),
        (lambda x: md.sum(merged(x, ["channels", "length"]), "m"), ALL * 8),
        (lambda x: md.sum(merged(x), "batch"), ALL / 2 * 32 * 64),  # a gather is half a sum
        (lambda x: md.sum(merged(x.rename(channels="free"), ["length", "free"]), "m"), ALL * 8),
        (lambda x: md.sum(merged(x) * numbers(batch), "m"), ALL * 8),
        (md.grad(lambda x: md.sum(md.sin(md.sum(merged(x), "m")))), ALL * 8),
    ],
)
def test_sums_move_what_is_left(function, sent):
    program = lowered(function, random([batch, length, channels]), layout=LAYOUT, mesh=MESH)
    assert program.wire_bytes == pytest.approx(sent)


@pytest.mark.parametrize("over", ["m", "length", ["m", "length"], ["batch", "m"]])
@pytest.mark.parametrize("mesh", ["model:8", "model:4", "data:2,model:4"])
def test_parts_that_are_merged_in_another_order_are_summed_where_they_are(over, mesh):
    def function(x):
        return md.sum(merged(x.split(channels, [group, member]), ["member", "group"]), over)

    layout = f"{LAYOUT}; batch:data" if "data" in mesh else LAYOUT
    program = lowered(function, random([batch, length, channels]), layout=layout, mesh=mesh)
    assert program.wire_bytes < GATHERED / 3


@pytest.mark.parametrize(
    "function",
    [
        lambda x: (md.sin(merged(x)), md.sum(merged(x), "m")),  # it is needed anyway
        lambda x: md.sum(merged(x) * numbers(md.Dimension("m", 32 * 64)), "m"),
        lambda x: md.sum(md.cumsum(merged(x), "m"), "m"),
        lambda x: md.sum(md.outer(md.add, merged(x), numbers(length)), "m"),  # a part's name
        lambda x: md.argmax(merged(x), "m"),
        lambda x: md.prod(md.merge(x * 0.1 + 1, ["batch", "length"], "batch"), "batch"),
    ],
)
@pytest.mark.parametrize("mesh", ["model:8", "model:5"])
def test_other_readers_have_the_same_numbers(function, mesh):
    lowered(function, random([batch, length, channels]), layout=LAYOUT, mesh=mesh)


def test_a_merged_dim_that_is_split_over_more_axes_stays_so():
    """Its elements would be added up by fewer devices."""

    def function(x):
        return md.sum(md.tanh(merged(x)), "m")

    program = lowered(function, random([batch, length, channels]), layout="m:model", mesh="model:8")
    alone = md.jit(function).lower(md.spec([batch, length, channels], "float64"))
    assert program.flops <= alone.flops / 7


def test_merges_in_a_loop_are_summed_before():
    layers = md.Dimension("layers", 3)

    def function(xs):
        def body(carry, x):
            return carry + md.sum(merged(x)), md.sum(merged(x), "m")

        return md.scan(body, md.zeros([], "float64"), xs, "layers")

    program = lowered(function, random([layers, batch, length, channels]), layout=LAYOUT, mesh=MESH)
    assert program.wire_bytes < 3 * ALL * 12
