"""The JAX backend where XLA:CPU is particular."""

import numpy as np
import pytest

import meshdsl as md
from tests.ops.agreement import random


def test_padded_blocks_of_a_solve_can_be_sent():
    """XLA:CPU took the block that is nothing but pads for a constant, laid out in another way."""
    row, column, side, batch, one = md.dims(row=2, column=2, side=2, batch=3, one=1)
    low = random([batch, one, row, column])
    right = random([batch, one, row, side], seed=1)

    def twice(low, right):
        x = md.linalg.triangular_solve(low, right, "row", "column")
        back = low.rename(row="side", column="end")
        return md.linalg.triangular_solve(back, x, "side", "end")

    expected = md.jit(twice, backend="numpy")(low, right)
    for layout in ("side:x", "end:x", "column:x", "row:x?; side:x?"):
        found = md.jit(twice, "x:3", layout)(low, right)
        np.testing.assert_allclose(np.asarray(found), np.asarray(expected), rtol=1e-9)


def test_a_single_row_can_be_transformed():
    """XLA:CPU chose an order in memory that its transform does not take."""
    x = random(md.dims(e=4, f=8))

    def waves(x):
        return md.real(md.fft.rfft(x, "f"))

    expected = md.jit(waves, backend="numpy")(x)
    for layout in ("e:y; f:x?", "e:y", "f:y; e:x?"):
        found = md.jit(waves, "x:2,y:4", layout)(x)
        np.testing.assert_allclose(np.asarray(found), np.asarray(expected), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("cut", [(1, 1), (0, 2), (3, 0), (2, 1)])
def test_filters_are_larger_than_an_operand_with_zeros_between_its_elements(cut):
    """XLA:CPU ended the process: it had operand and filters change places along one dim alone."""
    x = random(md.dims(height=1, width=3, channels=2))
    filters = random(md.dims(down=4, across=2, features=2, channels=2), seed=1)
    sides = {"height": "down", "width": "across"}
    padding = {"height": cut, "width": (1, 1)}

    def spread(x, filters):
        strides = {"height": 1, "width": 2}
        return md.conv_transpose(x, filters, sides, "channels", "features", strides, padding)

    expected = md.jit(spread, backend="numpy")(x, filters)
    found = md.jit(spread)(x, filters)
    np.testing.assert_allclose(np.asarray(found), np.asarray(expected), rtol=1e-9, atol=1e-12)
