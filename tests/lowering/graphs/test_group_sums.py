"""Sums over groups of a split dim send one number per group where that is less."""

import numpy as np
import pytest

import meshdsl as md
from tests.lowering.plans import lowered
from tests.ops.agreement import random

rows, columns = md.dims(rows=3, columns=24)
X = random([rows, columns])


def grouped(*sizes, over=("last",), along=()):
    names = ("first", "middle", "last") if len(sizes) == 3 else ("first", "last")
    parts = [md.Dimension(name, n) for name, n in zip(names, sizes, strict=True)]

    def function(x):
        return md.sum(md.sin(x).split("columns", parts), [*over, *along])

    return function


@pytest.mark.parametrize(
    ("function", "numbers"),
    [
        (grouped(2, 12), 3 * 2),
        (grouped(2, 12, along=["rows"]), 2),
        (grouped(3, 8), 3 * 3),
    ],
)
def test_one_number_per_group_is_reduced(function, numbers):
    program = lowered(function, X, layout="columns:x", mesh="x:8")
    assert program.wire_bytes == pytest.approx(2 * 7 / 8 * numbers * 8)
    assert [c.kind for c in program.collectives] == ["all_reduce"]


@pytest.mark.parametrize("over", [("last",), ("middle", "last"), ("middle",), ("first",)])
def test_sums_over_any_of_the_parts_are_right(over):
    lowered(grouped(2, 3, 4, over=over), X, layout="columns:x", mesh="x:8")


def test_groups_that_devices_have_whole_stay_where_they_are():
    program = lowered(grouped(8, 3), X, layout="columns:x; first:x", mesh="x:8")
    assert not program.collectives


def test_many_groups_of_few_elements_are_moved_to_their_devices():
    program = lowered(grouped(12, 2), X, layout="columns:x", mesh="x:5")
    assert "all_reduce" not in [c.kind for c in program.collectives]


def test_a_nan_stays_in_its_group():
    x = np.ones((3, 24))
    x[0, 1], x[1, 23] = np.nan, np.inf
    summed = md.jit(
        lambda x: md.sum(x.split("columns", md.dims(first=2, last=12)), "last"), "x:8", "columns:x"
    )(md.named(x, [rows, columns]))
    np.testing.assert_array_equal(np.asarray(summed), x.reshape(3, 2, 12).sum(-1))


def test_groups_in_a_loop_are_summed_where_they_are():
    def loop(x):
        def step(carry, row):
            return carry, md.sum(row.split("columns", md.dims(first=2, last=12)), "last")

        return md.scan(step, md.zeros([]), x, dim="rows")[1]

    program = lowered(loop, X, layout="columns:x", mesh="x:8")
    assert [c.kind for c in program.collectives] == ["all_reduce"]
