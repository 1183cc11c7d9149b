"""Waits for data, against a device whose work ends by a clock of the test's own."""

import numpy as np
import pytest

from meshdsl.optim import Sgd
from meshdsl.tensors.named_array import NamedArray
from meshdsl.training import Recipe, loop, train
from meshdsl.training.data.feeding import Data, Feed
from meshdsl.training.programs import Programs
from meshdsl.training.reporting.pending import Pending
from meshdsl.training.reporting.time_shares import TimeShares
from tests.training import classifier


class Device:
    """Takes calls one after another, and has a clock that moves only where the test says so."""

    def __init__(self):
        self.now = self.free = 0.0
        self.idle = 0.0  # of the waits so far

    def clock(self):
        return self.now

    def wait(self, seconds):
        """Lets the host wait."""
        end = self.now + seconds
        self.idle += end - min(max(self.now, self.free), end)
        self.now = end

    def call(self, seconds, value=0.0):
        """Returns a result that is ready when its call has had its time."""
        self.free = max(self.now, self.free) + seconds
        return Result(self, self.free, value)


class Result:
    def __init__(self, device, end, value):
        self.device, self.end, self.value = device, end, value

    def is_ready(self):
        return self.device.now >= self.end

    def block_until_ready(self):
        self.device.now = max(self.device.now, self.end)
        return self

    def __array__(self, dtype=None, copy=None):
        return np.asarray(self.block_until_ready().value, dtype)


def counted(device, waits, call):
    """Returns the idle seconds of waits that are each followed by a call."""
    pending = Pending(device.clock)
    for wait in waits:
        with pending.waiting():
            device.wait(wait)
        pending.dispatching()
        pending.metrics.append({"loss": NamedArray(device.call(call), ())})
    pending.metrics[-1]["loss"].data.block_until_ready()
    return pending.settle()


def test_the_device_runs_until_its_result_is_ready():
    device = Device()
    pending = Pending(device.clock)
    assert not pending.running()
    pending.metrics.append({"loss": NamedArray(device.call(0.6), ())})
    assert pending.running()
    device.wait(0.6)
    assert not pending.running()
    pending.metrics.append({"loss": NamedArray(np.zeros(()), ())})  # was ready when it came
    assert not pending.running()


@pytest.mark.parametrize(
    ("waits", "call", "idle"),
    [
        ([0.0, 0.7, 0.7, 0.7], 0.6, 0.3),  # the device waits a little
        ([0.7, 10.0, 10.0], 0.5, 19.7),  # it waits nearly always
        ([0.1] * 8, 0.6, 0.1),  # only for the first batch
        ([0.0, 0.0, 0.0, 2.5, 0.0], 0.5, 1.0),  # three calls end in one wait
    ],
)
def test_a_wait_counts_only_from_the_end_of_the_work(waits, call, idle):
    device = Device()
    assert counted(device, waits, call) == pytest.approx(idle)
    assert device.idle == pytest.approx(idle)


@pytest.mark.parametrize("seed", range(20))
def test_the_idle_time_of_any_waits_is_that_of_the_device(seed):
    random, device = np.random.default_rng(seed), Device()
    for _ in range(5):  # reports
        before = device.idle
        found = counted(device, random.exponential(0.5, 12), random.uniform(0.1, 1.0))
        assert found == pytest.approx(device.idle - before)


def test_a_last_wait_after_which_no_step_comes_does_not_lengthen_the_others():
    device = Device()
    pending = Pending(device.clock)
    for wait in (0.0, 0.7, 50.0):  # the data ends after the last
        with pending.waiting():
            device.wait(wait)
        if wait < 50:
            pending.dispatching()
            pending.metrics.append({"loss": NamedArray(device.call(0.6), ())})
    # The shortest time within which a step is known to have ended is 0.7 s.
    assert pending.settle() == pytest.approx(49.3)


def test_a_run_counts_waits_in_which_the_device_ends_a_step_as_far_as_it_is_idle(monkeypatch):
    device = Device()
    compiled, following = Programs.compiled, Feed.__next__

    def asynchronous(self, which):
        step = compiled(self, which)

        def call(state, batch):
            state, metrics = step(state, batch)
            late = device.call(0.6, metrics["loss"].data)
            return state, metrics | {"loss": NamedArray(late, metrics["loss"].dims)}

        return call

    def slow(self):
        device.wait(0.7)
        return following(self)

    monkeypatch.setattr(loop, "TimeShares", lambda: TimeShares(device.clock))
    monkeypatch.setattr(Programs, "compiled", asynchronous)
    monkeypatch.setattr(Feed, "__next__", slow)
    result = train(
        Recipe(classifier.init, classifier.loss, Sgd(0.1)),
        Data(classifier.endless(), classifier.BATCH_DIMS),
        steps=6,
        backend="numpy",
        reporting=loop.Reporting(log_every=3, quiet=True),
    )
    line = result.history[-1]
    # Twice: a wait of 0.7 s, two of 0.7 s beside a step of 0.6 s, and the last step of 0.6 s.
    total, idle = 2 * (3 * 0.7 + 0.6), 2 * (0.7 + 2 * 0.1)
    assert device.idle == pytest.approx(idle)
    assert line["data_share"] == pytest.approx(idle / total)
    assert line["steps_share"] == pytest.approx(1 - idle / total)
