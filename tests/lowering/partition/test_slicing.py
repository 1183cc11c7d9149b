"""Windows pass partial sums on and leave other dims split; the bytes are in test_moves."""

import numpy as np
import pytest

import meshdsl as md
from tests.lowering.plans import collectives, lowered
from tests.ops.agreement import random

length, d_ff, embed = md.dims(length=8, d_ff=8, embed=4)
H, W = random([length, d_ff]), random([d_ff, embed], seed=1)


def test_partial_sums_are_added_up_after_the_part_that_is_kept():
    def model(h, w):
        return md.einsum(h, w, over="d_ff")["length", 2:4]

    found = collectives(model, H, W, layout="d_ff:model")
    assert found == ["all_reduce model [length=2, embed=4]"]


def test_partial_sums_move_along_a_split_dim():
    def model(h, w):
        return md.sum(md.shift(md.einsum(h, w, over="d_ff"), "length", 1), "embed")

    found = collectives(model, H, W, layout="d_ff:model; length:data")
    assert found == ["permute data [length=2, embed=4]", "all_reduce model [length=8]"]


def test_a_window_filled_with_something_needs_the_sum_first():
    def model(h, w):
        return md.pad(md.einsum(h, w, over="d_ff"), "length", 4, value=1)

    found = collectives(model, H, W, layout="d_ff:model")
    assert found == ["all_reduce model [length=8, embed=4]"]


@pytest.mark.parametrize("layout", ["d_ff:model", "d_ff:model; length:data"])
def test_a_window_that_never_reads_what_it_is_filled_with_leaves_partial_sums(layout):
    """The sum has as many numbers as are kept, not as many as there were."""

    def model(h, w):
        return md.sin(md.pad(md.einsum(h, w, over="d_ff"), "length", -2, -2, value=-np.inf))

    found = collectives(model, H, W, layout=layout)
    assert found == ["all_reduce model [length=4, embed=4]"]


def test_a_position_of_a_partial_sum_is_added_up_over_both_axes_at_once():
    def model(h, w):
        return md.einsum(h, w, over="d_ff")["length", 5]

    found = collectives(model, H, W, layout="d_ff:model; length:data")
    assert found == ["all_reduce data+model [embed=4]"]


def test_other_dims_stay_split():
    for layout in ("d_ff:data+model", "d_ff:model+data", "d_ff:model"):
        assert collectives(lambda h: md.flip(h, "length"), H, layout=layout) == []


def test_wrapping_around_on_one_device_is_two_slices():
    program = lowered(lambda h: md.shift(h, "length", 3, wrap=True), H, layout="", mesh="x:1")
    assert [i.op for i in program.block.instructions] == ["window", "window", "concat"]


def test_what_lies_outside_altogether_is_made_and_not_moved():
    found = lowered(lambda h: md.shift(h, "length", 8) + 1, H, layout="length:data")
    assert not found.collectives
    assert np.array_equal(
        md.jit(lambda h: md.shift(h, "length", 8), "x:2", "length:x", "numpy")(H), np.zeros((8, 8))
    )
