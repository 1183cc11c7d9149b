"""Schedules, against optax's and against their own corners."""

import numpy as np
import optax
import pytest

import meshdsl as md
from meshdsl.optim import schedules


def values(schedule, steps=40):
    at = md.jit(lambda step: schedule(step))
    return np.array([float(at(step)) for step in range(steps)])


def assert_same(ours, theirs, steps=40):
    expected = np.array([float(theirs(step)) for step in range(steps)])
    np.testing.assert_allclose(values(ours, steps), expected, rtol=1e-6, atol=1e-7)


def test_constant():
    assert_same(schedules.constant(0.3), optax.constant_schedule(0.3))


def test_linear():
    assert_same(schedules.linear(1.0, 0.1, 20), optax.linear_schedule(1.0, 0.1, 20))


def test_cosine():
    assert_same(schedules.cosine(0.5, 0.05, 30), optax.cosine_decay_schedule(0.5, 30, alpha=0.1))


def test_join_starts_each_schedule_anew():
    ours = schedules.join([schedules.linear(0, 1, 10), schedules.cosine(1, 0, 20)], [10])
    theirs = optax.join_schedules(
        [optax.linear_schedule(0, 1, 10), optax.cosine_decay_schedule(1, 20)], [10]
    )
    assert_same(ours, theirs)


@pytest.mark.parametrize("warmup", [1, 7])
def test_warmup_cosine(warmup):
    ours = schedules.warmup_cosine(0.2, warmup, 30, end=0.02)
    assert_same(ours, optax.warmup_cosine_decay_schedule(0.0, 0.2, warmup, 30, 0.02))


def test_without_warm_up_the_first_step_has_the_peak():
    assert values(schedules.warmup_cosine(0.2, 0, 30), 1)[0] == np.float32(0.2)
    assert values(schedules.warmup_constant(0.2, 0), 1)[0] == np.float32(0.2)


def test_warmup_constant_and_warmup_linear():
    peak = np.array([0, 0.05, 0.1, 0.15, 0.2, 0.2, 0.2])
    np.testing.assert_allclose(values(schedules.warmup_constant(0.2, 4), 7), peak, rtol=1e-6)
    falling = np.array([0, 0.1, 0.2, 0.15, 0.1, 0.05, 0.0, 0.0])
    found = values(schedules.warmup_linear(0.2, 2, 6), 8)
    np.testing.assert_allclose(found, falling, rtol=1e-6, atol=1e-8)


def test_warmup_stable_decay_has_three_phases():
    found = values(schedules.warmup_stable_decay(1.0, 2, 4, 10, end=0.2), 12)
    expected = [0, 0.5, 1, 1, 1, 1, 1, 0.8, 0.6, 0.4, 0.2, 0.2]
    np.testing.assert_allclose(found, expected, rtol=1e-6)


@pytest.mark.parametrize(("warmup", "end"), [(4, 0.0), (0, 0.0), (4, 0.1)])
def test_warmup_inverse_square_root(warmup, end):
    """From the warm-up on, peak * sqrt(warmup / step), as in Megatron-LM."""
    first = max(warmup, 1)
    begun = np.arange(12) + (warmup == 0)
    falling = np.maximum(0.2 * np.sqrt(first / np.maximum(begun, first)), end)
    expected = np.where(np.arange(12) < warmup, 0.2 * np.arange(12) / first, falling)
    found = values(schedules.warmup_inverse_square_root(0.2, warmup, end), 12)
    np.testing.assert_allclose(found, expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("name", "theirs"),
    [
        ("cosine", optax.warmup_cosine_decay_schedule(0.0, 0.2, 5, 40, 0.02)),
        ("linear", [optax.linear_schedule(0, 0.2, 5), optax.linear_schedule(0.2, 0.02, 35)]),
        (
            "wsd",
            [
                optax.linear_schedule(0, 0.2, 5),
                optax.constant_schedule(0.2),
                optax.linear_schedule(0.2, 0.02, 4),
            ],
        ),
        ("constant", optax.warmup_constant_schedule(0.0, 0.2, 5)),
    ],
)
def test_by_name_they_are_those_of_optax(name, theirs):
    if isinstance(theirs, list):
        theirs = optax.join_schedules(theirs, [5, 36][: len(theirs) - 1])
    assert_same(schedules.by_name(name, 0.2, 5, 40, 0.02), theirs, 44)


def test_every_schedule_has_its_peak_after_the_warm_up_and_its_end():
    for name in schedules.NAMES:
        rates = values(schedules.by_name(name, 0.2, 4, 20, 0.15, decay_steps=3), 30)
        np.testing.assert_allclose(rates[:5], [0, 0.05, 0.1, 0.15, 0.2], rtol=1e-6)
        assert rates[20:].min() == rates[-1] == np.float32(0.2 if name == "constant" else 0.15)


def test_a_rate_is_a_float32_without_dims():
    at = md.jit(lambda step: schedules.warmup_cosine(0.2, 3, 9)(step))
    assert repr(at(1)).startswith("NamedArray(f32[]")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: schedules.linear(1, 0, 0), "a schedule needs at least 1 step, got 0"),
        (lambda: schedules.warmup_cosine(1, -1, 5), "warmup_steps must not be negative, got -1"),
        (
            lambda: schedules.warmup_cosine(1, 5, 5),
            "warm-up and decay take 5 steps, which leaves none of total_steps=5",
        ),
        (
            lambda: schedules.by_name("cosin", 1, 0, 5),
            "unknown schedule 'cosin'; choose one of cosine, linear, wsd, inverse_square_root, "
            "constant. Did you mean `cosine`?",
        ),
        (
            lambda: schedules.by_name("cosine", 0.1, 0, 5, end=0.2),
            "the lowest learning rate, 0.2, is above the peak, 0.1",
        ),
        (
            lambda: schedules.by_name("wsd", 0.1, 2, 5, decay_steps=3),
            "warm-up and decay take 5 steps, which leaves none of total_steps=5",
        ),
        (
            lambda: schedules.join([schedules.constant(1)] * 3, [5, 2]),
            "3 schedules need 2 rising boundaries, got [5, 2]",
        ),
    ],
)
def test_numbers_out_of_range(make, message):
    with pytest.raises(ValueError) as error:
        make()
    assert str(error.value) == message
