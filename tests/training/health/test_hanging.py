"""A run that gets nowhere says where it is, and ends."""

import subprocess
import sys
import time

import pytest

from meshdsl.training.health.hanging import HangWatch

HANGING = """
import time
from meshdsl.optim import AdamW
from meshdsl.training import Data, Health, Recipe, train
from tests.training import classifier

def batches():
    for number, batch in enumerate(classifier.endless()):
        if number == 3:
            stand_still()
        yield batch

def stand_still():
    time.sleep(600)

train(
    Recipe(classifier.init, classifier.loss, AdamW(0.05)),
    Data(batches(), classifier.BATCH_DIMS),
    steps=9,
    backend="numpy",
    health=Health(step_timeout=5),
)
"""


@pytest.fixture
def ended():
    """Returns a watch of 0.2 seconds, and the reasons by which it ends the process."""
    reasons = []
    watch = HangWatch(0.2, 3, reasons.append)
    with watch:
        yield watch, reasons


def wait_for(condition):
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_what_takes_too_long_is_named_with_the_process(ended):
    watch, reasons = ended
    watch.at("in step 7")
    wait_for(lambda: reasons)
    (reason,) = reasons
    assert reason.startswith("process 3, in step 7, has got nowhere for 0.2 s (--step_timeout): ")


def test_compiling_may_take_as_long_as_it_likes(ended):
    watch, reasons = ended
    watch.at("in step 7")
    watch.at(None)
    time.sleep(0.5)
    assert not reasons


def test_nothing_is_ended_after_the_run():
    reasons = []
    with HangWatch(0.1, 0, reasons.append) as watch:
        watch.at("saving step 3")
    time.sleep(0.3)
    assert not reasons


def test_time_in_which_the_process_itself_stood_still_is_not_counted(monkeypatch):
    reasons, looks = [], iter([True] * 3 + [False] * 3)
    now = [0.0]
    watch = HangWatch(8.0, 0, reasons.append)
    watch._since = 0.0

    def wait(seconds):
        now[0] += 1000.0 if next(looks) else seconds
        return len(reasons) > 0 or now[0] > 3005.0

    monkeypatch.setattr(watch._over, "wait", wait)
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    watch._doing = "in step 2"
    watch._watch(8.0)
    assert not reasons


@pytest.mark.long
def test_a_run_whose_data_never_comes_shows_the_line_that_waits():
    done = subprocess.run(
        [sys.executable, "-c", HANGING], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 1, done.stderr
    told = done.stderr
    assert "process 0, waiting for the data of step 4, has got nowhere for 5 s" in told
    assert "in stand_still" in told
