"""Where the time of a run goes, by a clock that moves only where the test says so."""

import json

import pytest

from meshdsl.optim import Sgd
from meshdsl.training import Recipe, loop, train
from meshdsl.training.checkpointing.checkpoints import Checkpoints
from meshdsl.training.checkpointing.saving import Saving
from meshdsl.training.data.feeding import Data, Feed
from meshdsl.training.evaluation import Evaluation
from meshdsl.training.reporting.time_shares import TimeShares
from meshdsl.training.run import Run
from tests.training import classifier

SECONDS = {
    "steps_share": 40,
    "data_share": 12,
    "saving_share": 7,
    "evaluating_share": 5,
    "compiling_share": 0,
}


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def test_every_second_is_that_of_a_part_or_of_steps():
    clock = Clock()
    shares = TimeShares(clock)
    assert shares.read() == {} and str(shares) == ""
    with shares.spent("compiling"):
        clock.now += 10
    clock.now += 5  # the first state is made
    shares.begin_steps()
    clock.now += 70
    clock.now += 12
    shares.add("data", 2)
    with pytest.raises(ValueError), shares.spent("saving"):
        clock.now += 3
        raise ValueError
    assert shares.read() == {
        "steps_share": 0.8,
        "compiling_share": 0.1,
        "data_share": 0.02,
        "saving_share": 0.03,
        "evaluating_share": 0.0,
    }
    assert str(shares) == (
        "time: 80.0 % steps, 10.0 % compiling, 2.0 % waiting for data, 3.0 % saving, 5.0 % starting"
    )


def test_a_run_reports_where_its_time_goes(tmp_path, monkeypatch, capsys):
    clock = Clock()
    monkeypatch.setattr(loop, "TimeShares", lambda: TimeShares(clock))

    def slower(kind, name, seconds):
        """Makes a method take seconds of the clock."""
        method = getattr(kind, name)

        def taking(self, *arguments, **options):
            clock.now += seconds
            return method(self, *arguments, **options)

        monkeypatch.setattr(kind, name, taking)

    slower(Run, "_step", 10)
    slower(Run, "_evaluated", 5)
    slower(Feed, "__next__", 3)  # no device works meanwhile: the backend is numpy
    slower(Checkpoints, "save", 7)
    train(
        Recipe(classifier.init, classifier.loss, Sgd(0.1)),
        Data(classifier.endless(), classifier.BATCH_DIMS),
        steps=4,
        backend="numpy",
        workdir=tmp_path,
        evaluation=Evaluation(classifier.batches(2, seed=9), eval_every=4),
        reporting=loop.Reporting(log_every=2),
        saving=Saving(every=2),
    )
    metrics = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    total = 40 + 12 + 7 + 5  # the second save comes after the last report
    assert {name: metrics[-1][name] * total for name in SECONDS} == pytest.approx(SECONDS)
    assert metrics[0]["steps_share"] == pytest.approx(20 / 26)
    expected = "time: 56.3 % steps, 16.9 % waiting for data, 19.7 % saving, 7.0 % evaluating"
    assert capsys.readouterr().out.splitlines()[-1] == expected
