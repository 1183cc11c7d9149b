"""The collectives of the JAX backend where XLA is particular."""

import numpy as np

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
    for layout in ("side:x?; one:x?", "end:x?; one:x?", "column:x?; one:x?", "row:x?; side:x?"):
        found = md.jit(twice, "x:3", layout)(low, right)
        np.testing.assert_allclose(np.asarray(found), np.asarray(expected), rtol=1e-9)
