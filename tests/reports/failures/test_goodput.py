"""Goodput: the formulas against Daly's, and against failures drawn one by one."""

import math

import numpy as np
import pytest

from meshdsl.reports.failures.goodput import Faults, shares

HOUR = 3600.0


def cycle(faults, interval, random):
    """Returns a cycle's useful seconds and its whole time, drawn by a clock of its own.

    It starts with a restart and ends with the next failure that needs a checkpoint. Failures that
    are recovered from in place stop everything for a while.
    """
    clock, period = 0.0, max(interval, faults.write) + faults.save
    ends = random.exponential(faults.mtbf / (1 - faults.in_place))
    soft = math.inf
    if faults.in_place:
        soft = random.exponential(faults.mtbf / faults.in_place)
    moments, counted = faults.restart + period + faults.write, 0  # of the next complete checkpoint
    worked = 0.0  # time without recoveries
    while True:
        stop = min(ends, soft)
        span = stop - clock
        while worked + span >= moments:
            counted += 1
            moments += period
        worked, clock = worked + span, stop
        if stop == ends:
            return counted * interval, ends, worked
        clock += faults.recovery
        soft = clock + random.exponential(faults.mtbf / faults.in_place)
        if clock >= ends:
            return counted * interval, ends, worked


CASES = [
    (Faults(10 * HOUR, 30, 0, 300), 0.5 * HOUR),
    (Faults(2 * HOUR, 5, 400, 600), 900.0),
    (Faults(1 * HOUR, 120, 0, 900), 1 * HOUR),
    (Faults(1 * HOUR, 2, 200, 300), 60.0),  # the next save waits for the one before
    (Faults(0.5 * HOUR, 10, 60, 300, in_place=0.8, recovery=20), 600.0),
    (Faults(0.2 * HOUR, 10, 60, 300, in_place=0.95, recovery=90), 400.0),
]


@pytest.mark.parametrize(("faults", "interval"), CASES)
def test_the_share_of_useful_steps_is_that_of_failures_drawn_one_by_one(faults, interval):
    random = np.random.default_rng(7)
    drawn = np.array([cycle(faults, interval, random) for _ in range(20_000)])
    useful, total, worked = drawn.mean(0)
    expected = shares(faults, interval)
    for part, found in ((drawn[:, 0], expected.useful), (drawn[:, 2], 1 - expected.recovering)):
        error = (part - found * drawn[:, 1]).std() / math.sqrt(len(drawn)) / total
        assert part.mean() / total == pytest.approx(found, abs=4 * error + 1e-12)
    assert useful < worked <= total


@pytest.mark.parametrize(("faults", "interval"), CASES)
def test_the_parts_are_all_of_the_time(faults, interval):
    found = shares(faults, interval)
    parts = (found.useful, found.saving, found.lost, found.restarting, found.recovering)
    assert sum(parts) == pytest.approx(1)
    assert min(parts) >= 0


def test_without_delays_the_time_is_dalys():
    mtbf, save, restart, interval = 5 * HOUR, 60.0, 600.0, 2000.0
    daly = mtbf * math.exp(restart / mtbf) * math.expm1((interval + save) / mtbf) / interval
    assert shares(Faults(mtbf, save, 0, restart), interval).useful == pytest.approx(1 / daly)


@pytest.mark.parametrize(
    ("faults", "interval"), [(Faults(HOUR, 1, 0, 300), 1e7), (Faults(HOUR, 1, 1e12, 1e12), 60.0)]
)
def test_what_takes_far_longer_than_the_time_between_failures_is_never_useful(faults, interval):
    found = shares(faults, interval)
    assert (found.useful, found.saving) == (0.0, 0.0)
    assert found.lost + found.restarting == 1


@pytest.mark.parametrize(("faults", "interval"), CASES)
def test_no_interval_is_better_than_the_best(faults, interval):
    best = shares(faults, faults.best).useful
    every = np.geomspace(1, 20 * faults.mtbf, 4000)
    assert max(shares(faults, one).useful for one in every) <= best * (1 + 1e-9)


def test_the_published_intervals_are_near_the_best_where_failures_are_rare():
    faults = Faults(24 * HOUR, 60, 0, 600)
    assert faults.young == pytest.approx(math.sqrt(2 * 60 * 24 * HOUR))
    assert faults.daly == pytest.approx(faults.best, rel=1e-3)
    assert abs(faults.daly - faults.best) < abs(faults.young - faults.best)
    frequent = Faults(20, 60, 0, 10)  # Daly's formula ends where saving takes twice the mtbf
    assert frequent.daly == 20


def test_if_every_failure_is_recovered_from_in_place_only_recoveries_cost():
    faults = Faults(1 * HOUR, 10, 0, 300, in_place=1.0, recovery=36.0)
    found = shares(faults, 990.0)
    assert faults.best == faults.young == faults.daly == math.inf
    assert found.useful == pytest.approx(0.99 / 1.01)
    assert found.recovering == pytest.approx(0.01 / 1.01)
    nearly = shares(Faults(1 * HOUR, 10, 0, 300, in_place=1 - 1e-12, recovery=36.0), 990.0)
    assert nearly.useful == pytest.approx(found.useful)
