"""The plain programs beside which a GPU is measured take the same step as ours."""

import jax
import numpy as np
import pytest

from tests.benchmarks.gpu_time import CASES, flops, our_calls, their_calls
from tests.benchmarks.gspmd_time import random_batch
from tests.benchmarks.test_baselines import (
    CLOSE,
    assert_close,
    copied,
    numbers,
    started_from,
    their_numbers,
)


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_a_plain_program_takes_the_same_step(name):
    case = CASES[name](small=True)
    function, (_, batch_spec) = case.jitted()
    state, batch = started_from(case.initial()), random_batch(batch_spec)
    program, like, batch_like = case.theirs()
    theirs = copied(like, numbers(state.params))
    their_batch = {
        part: jax.device_put(np.asarray(batch[part].data), leaf.sharding)
        for part, leaf in batch_like.items()
    }
    state, metrics = function(state, batch)
    theirs, their_metrics = program(theirs, their_batch)
    np.testing.assert_allclose(metrics["loss"].data, their_metrics["loss"], rtol=CLOSE)
    assert_close(numbers(state.params), their_numbers(theirs["params"]))


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_both_are_called_in_turn(name):
    case = CASES[name](small=True)
    assert next(our_calls(case, 1)) > 0
    assert next(their_calls(case, 1)) > 0


def test_flops_are_those_of_the_formula():
    """GPT-2 small has 124.4 M parameters; 768 features of 1,024 positions are in a table."""
    config = CASES["gpt2_small"]().model.config
    one = flops(config, 124_439_808, 1, 1024)
    assert one == 6 * (124_439_808 - 1024 * 768) + 12 * 12 * 768 * 1024
