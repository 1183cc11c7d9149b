"""Hyperparameters out of range: one error that names all of them."""

import math

import numpy as np
import pytest

import meshdsl as md
from meshdsl.optim import AdamW, Sgd, clip_by_global_norm, schedules
from meshdsl.training.step import make_train_step

RATE = "learning_rate must be a number in [0, inf) or a schedule, got"


@pytest.mark.parametrize("kind", [AdamW, Sgd])
@pytest.mark.parametrize("rate", [-1, -1e-9, math.nan, math.inf, "fast", None, True])
def test_a_learning_rate_is_a_number_from_0_or_a_schedule(kind, rate):
    with pytest.raises(ValueError) as error:
        kind(rate)
    assert str(error.value) == f"{kind.__name__}: {RATE} {rate!r}"


@pytest.mark.parametrize("rate", [0, 1e-3, np.float32(0.1), np.int64(1), schedules.constant(0.1)])
def test_numbers_of_numpy_and_schedules_are_learning_rates(rate):
    assert AdamW(rate).learning_rate is rate


def test_everything_wrong_with_an_optimizer_is_in_one_error():
    with pytest.raises(ValueError) as error:
        AdamW(-1, b1=math.nan, eps=math.inf, weight_decay="a", mask=3)
    assert str(error.value) == (
        "AdamW: b1 must be in [0, 1), got nan; eps must be in (0, inf), got inf; "
        f"weight_decay must be in [0, inf), got 'a'; {RATE} -1; "
        "mask must be a function of path and shape, got 3"
    )
    with pytest.raises(ValueError) as error:
        Sgd(-2, momentum=1.0, weight_decay=-1)
    assert str(error.value) == (
        "Sgd: momentum must be in [0, 1), got 1.0; weight_decay must be in [0, inf), got -1; "
        f"{RATE} -2"
    )
    with pytest.raises(ValueError, match=r"^Sgd: .* got -1; nesterov needs a momentum above 0$"):
        Sgd(-1, nesterov=True)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: schedules.constant(-1), "value must be in [0, inf), got -1"),
        (
            lambda: schedules.linear(math.nan, -1, 0),
            "start must be in [0, inf), got nan; end must be in [0, inf), got -1; "
            "a schedule needs at least 1 step, got 0",
        ),
        (
            lambda: schedules.warmup_cosine(-0.1, -1, 2.5, math.inf),
            "peak must be in [0, inf), got -0.1; end must be in [0, inf), got inf; "
            "total_steps must be a whole number, got 2.5",
        ),
        (lambda: schedules.warmup_constant(-1, -1), "peak must be in [0, inf), got -1; "
         "warmup_steps must not be negative, got -1"),
        (
            lambda: schedules.warmup_stable_decay(1.0, 4, -2, 1),
            "decay_steps must not be negative, got -2; "
            "warm-up and decay take 2 steps, which leaves none of total_steps=1",
        ),
        (
            lambda: schedules.warmup_inverse_square_root(math.inf, 3),
            "peak must be in [0, inf), got inf",
        ),
        (
            lambda: schedules.by_name("cosine", math.nan, 0, 5),
            "peak must be in [0, inf), got nan",
        ),
        (lambda: schedules.join([], []), "there are no schedules to join"),
        (
            lambda: schedules.join([schedules.constant(1), 0.1], [1.5]),
            "2 schedules need 1 rising boundaries, got [1.5]; "
            "schedule 1 is no function of the step: 0.1",
        ),
    ],
)  # fmt: skip
def test_everything_wrong_with_a_schedule_is_in_one_error(make, message):
    with pytest.raises(ValueError) as error:
        make()
    assert str(error.value) == message


@pytest.mark.parametrize("norm", [0, -1, math.nan, math.inf, "1"])
def test_gradients_are_clipped_to_a_positive_finite_norm(norm):
    finite = " and finite" if norm == math.inf else ""
    with pytest.raises(ValueError) as error:
        clip_by_global_norm({"x": md.named(np.ones(3, "f4"), ["i"])}, norm)
    assert str(error.value) == (
        f"clip_by_global_norm: max_norm must be above 0{finite}, got {norm}"
    )
    with pytest.raises(ValueError, match=r"^clip_norm must be above 0"):
        make_train_step(lambda params, batch: 0.0, AdamW(0.1), clip_norm=norm)
