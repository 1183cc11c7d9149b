"""Dims of size 1 stay unsplit, unless they are cut out of longer ones."""

import numpy as np

import meshdsl as md
from meshdsl.layouts.layout import Layout
from meshdsl.lowering.ones import unsplit_ones
from tests.lowering.plans import collectives, lowered
from tests.ops.agreement import random

length, one, width = md.Dimension("length", 8), md.Dimension("length", 1), md.Dimension("width", 3)
CACHE, ROW, AT = random([length, width]), random([one, width], seed=1), md.named(np.int32(5), [])
SPLIT = "length:x"


def written(cache, row, at):
    return md.dynamic_update_slice(cache, md.sin(row), "length", at)


def test_a_row_written_into_a_split_dim_moves_nothing():
    assert collectives(written, CACHE, ROW, AT, layout=SPLIT, mesh="x:4") == []


def test_a_row_is_where_it_is_written_in_loops_too():
    def decode(cache, rows):
        def step(carry, row):
            cache, at = carry
            row = row.broadcast([one, width])
            return (md.dynamic_update_slice(cache, row, "length", at), at + 1), None

        return md.scan(step, (cache, md.full([], 2, "int32")), rows, dim="step")[0][0]

    rows = random([md.Dimension("step", 3), width], seed=2)
    assert collectives(decode, CACHE, rows, layout=SPLIT, mesh="x:4") == []


def test_several_rows_that_every_device_has_move_nothing():
    rows = random([md.Dimension("chunk", 3), width], seed=2)

    def chunk(cache, rows, at):
        rows = rows.rename({"chunk": "length"})
        return md.dynamic_update_slice(cache, rows, "length", at)

    assert collectives(chunk, CACHE, rows, AT, layout=SPLIT, mesh="x:4") == []


def test_a_slice_of_one_position_stays_where_it_is():
    program = lowered(lambda x: md.sin(x["length", 3:4]), CACHE, layout=SPLIT, mesh="x:4")
    assert [c.kind for c in program.collectives] in ([], ["permute"])


def test_of_names_that_are_resized_nothing_changes():
    layout = Layout.parse("length:x; width:y")
    free = md.jit(written).trace(CACHE, ROW, AT)
    assert unsplit_ones(free, layout).assign(ROW.dims).axes("length") == ()
    assert unsplit_ones(free, layout).assign(CACHE.dims).axes("length") == ("x",)
    cut = md.jit(lambda x: x["length", 3:4]).trace(CACHE)
    assert unsplit_ones(cut, layout).assign(ROW.dims).axes("length") == ("x",)
    assert str(unsplit_ones(free, layout)) == str(layout)
