"""Lion, against optax's."""

import numpy as np
import optax
import pytest

from meshdsl.optim import Lion, schedules
from meshdsl.tensors import dtypes
from tests.optim import trees


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_it_is_that_of_optax(decay):
    found, state = trees.run(Lion(0.01, weight_decay=decay), 5)
    theirs = optax.lion(0.01, weight_decay=decay, mask=trees.DECAYS)
    trees.assert_close(found, trees.run_optax(theirs, 5), 1e-6)
    assert [list(state.mean.params)] == [["blocks", "scale"]]


def test_a_schedule_sets_the_rate():
    found, _ = trees.run(Lion(schedules.linear(0.02, 0.0, 5), b1=0.8, b2=0.95), 5)
    theirs = optax.lion(optax.linear_schedule(0.02, 0.0, 5), 0.8, 0.95, weight_decay=0.0)
    trees.assert_close(found, trees.run_optax(theirs, 5), 1e-6)


def test_sharded_values_are_the_unsharded_ones_and_nothing_moves():
    optimizer = Lion(0.01, weight_decay=0.1)
    found, state = trees.run(optimizer, 3, *trees.SHARDED)
    expected, _ = trees.run(optimizer, 3)
    trees.assert_close(found, expected, 1e-6)
    assert trees.collectives(optimizer.update, trees.tree(0), state, trees.tree(0), 0) == []


def test_numbers_out_of_range_are_reported_together():
    with pytest.raises(ValueError) as error:
        Lion(-1, b1=1, b2=np.nan, weight_decay=-1)
    assert str(error.value) == (
        "Lion: b1 must be in [0, 1), got 1; b2 must be in [0, 1), got nan; "
        "weight_decay must be in [0, inf), got -1; "
        "learning_rate must be a number in [0, inf) or a schedule, got -1"
    )


def test_narrow_parameters_have_wide_means():
    _, state = trees.run(Lion(0.01), 1, dtype=dtypes.BFLOAT16)
    assert state.mean.params["scale"].dtype == np.float32
