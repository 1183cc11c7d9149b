"""Batch-size ramp-up, against Megatron-LM's rule."""

import itertools

import pytest

from meshdsl.training.batch_ramp import BatchRamp


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
    assert list(itertools.islice(ramp.batches(full), 200)) == expected
    assert expected[-1] == full
    seen = 0
    for steps, size in enumerate(expected):
        assert ramp.seen_after(steps, full) == seen
        assert ramp.size_at(seen, full) == size
        seen += size


def test_a_resumed_run_goes_on_with_the_same_sizes():
    ramp = BatchRamp(16, 8, 1000)
    whole = list(itertools.islice(ramp.batches(64), 60))
    for steps in (0, 7, 31, 59):
        rest = ramp.batches(64, seen=sum(whole[:steps]))
        assert list(itertools.islice(rest, 60 - steps)) == whole[steps:]


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
