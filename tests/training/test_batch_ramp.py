"""Batch-size ramp-up, against Megatron-LM's rule."""

import itertools

import numpy as np
import pytest

import meshdsl as md
from meshdsl.optim import AdamW
from meshdsl.training.batch_ramp import BatchRamp
from meshdsl.training.checkpointing.saving import Saving
from meshdsl.training.data import shuffled_batches
from meshdsl.training.state import create
from meshdsl.training.step import make_train_step
from meshdsl.training.stopping import Stops
from tests.training import classifier


def megatron(start, increment, samples, full):
    """Yields batch sizes as megatron/core/num_microbatches_calculator.py does."""
    increments = (full - start) // increment
    per_increment = samples / increments if increments > 0 else 0
    consumed = 0
    while True:
        if consumed > samples or per_increment == 0:
            size = full
        else:
            size = start + int(consumed / per_increment) * increment
            assert size <= full
        yield size
        consumed += size


@pytest.mark.parametrize(
    ("start", "increment", "samples", "full"),
    [(16, 8, 1000, 64), (1, 1, 7, 5), (32, 32, 100, 64), (8, 8, 10_000, 8), (4, 4, 1, 16)],
)
def test_sizes_follow_megatron_lm(start, increment, samples, full):
    ramp = BatchRamp(start, increment, samples)
    expected = list(itertools.islice(megatron(start, increment, samples, full), 200))
    assert expected[-1] == full
    seen = 0
    for size in expected:
        assert ramp.size_at(seen, full) == size
        seen += size


def test_it_is_read_from_text():
    assert BatchRamp.parse("16,8,300_000") == BatchRamp(16, 8, 300_000)
    assert BatchRamp(16, 8, 10).sizes(32) == [16, 24, 32]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: BatchRamp.parse("16,8"),
            "needs start,increment,samples, as in 16,8,300_000; got '16,8'",
        ),
        (
            lambda: BatchRamp.parse("0,8,0"),
            "batch ramp: start must be at least 1, got 0; samples must be at least 1, got 0",
        ),
        (
            lambda: BatchRamp(16, 8, 100).size_at(0, 60),
            "batch ramp: steps of 8 do not lead from 16 to a batch of 60; take a batch of 56 or "
            "64, or another start",
        ),
        (
            lambda: BatchRamp(16, 8, 100).sizes(8),
            "batch ramp: steps of 8 do not lead from 16 to a batch of 8; take a batch of 16 or 24, "
            "or another start",
        ),
    ],
)
def test_mistakes_are_told(make, message):
    with pytest.raises(ValueError) as error:
        make()
    assert str(error.value) == message


# In a run.

RAMP = BatchRamp(4, 4, 40)
SIZES = [4, 4, 4, 4, 8, 8, 12, 16, 16, 16]  # 0, 4, 8, 12 < 40/3 <= 16, 24 < 80/3 <= 32 < 40 <= 44


def run(workdir=None, batches=None, **options):
    batches = shuffled_batches(classifier.examples(), 16, seed=3) if batches is None else batches
    defaults = {"steps": 10, "log_every": 1, "batch_ramp": RAMP}
    return classifier.run(workdir, batches, **defaults | options)


def expected_losses():
    """Takes the steps one by one, each with as many of the examples as its batch has."""
    order = shuffled_batches(classifier.examples(), 1, seed=3)
    state = md.jit(create(classifier.init, AdamW(0.05)), backend="numpy")(md.random.key(0))
    step = md.jit(make_train_step(classifier.loss, AdamW(0.05)), backend="numpy")
    found = []
    for size in SIZES:
        ones = list(itertools.islice(order, size))
        batch = {name: np.concatenate([one[name] for one in ones]) for name in ones[0]}
        state, metrics = step(state, classifier.named(batch))
        found.append(float(metrics["loss"]))
    return found


@pytest.mark.long
@pytest.mark.parametrize(
    ("backend", "mesh", "layout"),
    [("numpy", None, None), ("jax", "data:2,model:2", classifier.LAYOUT)],
)
def test_a_run_grows_its_batches(backend, mesh, layout):
    result = run(backend=backend, mesh=mesh, layout=layout, tokens_per_batch=160)
    np.testing.assert_allclose(result.losses, expected_losses(), atol=2e-6)
    assert [line["samples"] for line in result.history] == list(itertools.accumulate(SIZES))
    assert [line["batch_size"] for line in result.history] == [*SIZES[1:], 16]
    for size, line in zip(SIZES, result.history, strict=True):
        assert line["tokens_per_second"] * line["step_seconds"] == pytest.approx(10 * size)


@pytest.mark.parametrize("stop", [2, 5, 9])
def test_it_goes_on_where_it_was(stop, tmp_path):
    first = run(tmp_path, saving=Saving(), stops=Stops(at_step=stop))
    rest = run(tmp_path, saving=Saving())
    np.testing.assert_allclose(first.losses + rest.losses, expected_losses(), atol=2e-6)


def test_batches_of_one_call_are_of_one_size(tmp_path):
    sizes = [4, 4, 4, 4, 8, 8, 12, 12, 16, 16]
    result = run(tmp_path, steps_per_call=2, log_every=2, saving=Saving(), stops=Stops(at_step=6))
    assert result.history[-1]["samples"] == sum(sizes[:6])
    rest = run(tmp_path, saving=Saving())  # one by one, from as many samples
    assert [line["samples"] for line in rest.history] == [44, 60, 76, 92]


def test_batches_that_cannot_grow_are_told():
    with pytest.raises(ValueError, match="batch_ramp: list_iterator gives batches of one size"):
        run(batches=classifier.batches(8))


def test_a_size_that_microbatches_do_not_divide_is_told_before_the_first_step():
    with pytest.raises(ValueError, match="microbatches"):
        run(microbatches=8)


def test_the_data_is_given_back_with_the_size_it_had():
    batches = shuffled_batches(classifier.examples(), 16, seed=3)
    run(batches=batches, steps=3)
    assert batches.batch_size == 16 and len(next(batches)["answer"]) == 16
