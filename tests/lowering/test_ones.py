"""Dims of size 1 are not split."""

import numpy as np
import pytest

import meshdsl as md
from meshdsl.layouts.layout import Layout
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


def test_a_slice_of_one_position_sends_that_position():
    program = lowered(lambda x: md.sin(x["length", 3:4]), CACHE, layout=SPLIT, mesh="x:4")
    assert program.wire_bytes < 2 * width.size * 8


def test_a_dim_of_size_1_is_split_nowhere():
    layout = Layout.parse("length:x; width:y; cache/length:x")
    assert layout.assign(ROW.dims).axes("length") == ()
    assert layout.assign(ROW.dims, "cache").axes("length") == ()
    assert layout.assign(ROW.dims).axes("width") == ("y",)
    assert layout.assign(CACHE.dims).axes("length") == ("x",)


def test_an_optional_rule_takes_the_axis_that_a_dim_of_size_1_leaves():
    layout = Layout.parse("length:x; width:x?")
    assert layout.assign(ROW.dims).axes("width") == ("x",)
    assert layout.assign(CACHE.dims).axes("width") == ()


@pytest.mark.parametrize("dtype", ["bool", "int8", "float32", "complex64"])
@pytest.mark.parametrize("at", [0, 3, 7])
def test_each_position_of_a_split_dim_is_picked(dtype, at):
    x = md.named((np.asarray(CACHE) > 0).astype(dtype), [length, width])

    def pick(x):
        return x["length", at : at + 1]

    for backend in ("numpy", "jax"):
        picked = md.jit(pick, "x:4", SPLIT, backend=backend)(x)
        np.testing.assert_array_equal(np.asarray(picked), np.asarray(x)[at : at + 1])


@pytest.mark.parametrize("backend", ["jax", "tf"])
@pytest.mark.parametrize("layout", [SPLIT, f"{SPLIT}; width:x?"])
def test_bools_that_are_picked_stay_bools(layout, backend):
    """Reduced everywhere, or scattered; alone, and two in one collective."""
    x = md.named(np.random.default_rng(0).random((8, 3)) < 0.5, [length, width])

    def pick(x):
        return md.index(x, "length", 1), x["length", 6:7], ~x["length", 3:4]

    for function in (pick, lambda x: pick(x)[:1]):
        found = md.jit(function, "x:4", layout, backend)(x)
        for mine, want in zip(found, md.jit(function, backend="numpy")(x), strict=True):
            assert mine.dtype == bool
            np.testing.assert_array_equal(np.asarray(mine), np.asarray(want))


@pytest.mark.parametrize(("layout", "writes"), [("", 1), ("width:x", 1), (SPLIT, 0)])
def test_a_row_is_written_in_place_unless_its_dim_is_split(layout, writes):
    def put(cache, at):
        return md.scatter(cache, at, 2.0, "length")

    wide = random([length, md.Dimension("width", 4)])
    row = random([one, md.Dimension("width", 4)], seed=1)
    for function, arguments in ((written, (wide, row, AT)), (put, (wide, AT))):
        program = lowered(function, *arguments, layout=layout, mesh="x:4")
        ops = [instruction.op for instruction in program.block.instructions]
        assert (ops.count("update"), ops.count("select")) == (writes, 1 - writes)
        assert program.collectives == ()


def test_a_row_that_is_written_over_a_donated_cache_takes_no_further_memory():
    cache, row = md.spec([md.Dimension("length", 4096), width]), md.spec([one, width])
    step = md.jit(written, donate="cache")
    assert step.lower(cache, row, md.spec([], "int32")).peak_bytes < 1.01 * 4096 * 3 * 4
