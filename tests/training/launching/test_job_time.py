"""The time of a job over all its starts: goodput, recoveries, and steps that were taken again."""

import json
import time

import pytest

from meshdsl.training.launching.events import NAME, first_step, losses
from meshdsl.training.launching.job_time import START, job_time
from tests.training.test_resume import lines, run


def record(folder, *events):
    lines = [json.dumps({"time": at, "event": kind, **facts}) for at, kind, facts in events]
    (folder / NAME).write_text("\n".join([*lines, ""]))


def started(at, start, step=None):
    return at, "started", {"start": start, "step": step}


def failed(at, start, repeated):
    return at, "failed", {"start": start, "repeated_seconds": repeated}


def stepped(at, start, step, recovery=None):
    return at, "stepped", {"start": start, "step": step, "recovery_seconds": recovery}


def test_a_process_that_no_supervisor_has_started_has_no_job(tmp_path):
    record(tmp_path, started(1.0, 1))
    assert job_time(tmp_path, {}) is None
    assert job_time(None, {START: "1"}) is None
    assert job_time(tmp_path / "nowhere", {START: "1"}) is None


def test_a_recovery_lasts_from_the_first_failure_until_a_step_is_finished(tmp_path):
    """Here the second start fails before it has finished a step."""
    record(
        tmp_path,
        (50.0, "started", {"start": 1, "step": 3}),  # of an earlier command
        failed(90.0, 1, 30.0),
        started(100.0, 1, 20),
        stepped(110.0, 1, 21),
        failed(150.0, 1, 6.0),
        started(151.0, 2, 60),
        failed(155.0, 2, 0.0),
        started(157.0, 3, 60),
    )
    job = job_time(tmp_path, {START: "3"})
    job.clock = lambda: 170.0
    job.stepped(61)
    last = json.loads((tmp_path / NAME).read_text().splitlines()[-1])
    assert (last["event"], last["start"], last["step"]) == ("stepped", 3, 61)
    assert (last["start_seconds"], last["recovery_seconds"]) == (13.0, 20.0)
    job.clock = lambda: 200.0
    assert job.shares(100, 0.75) == {
        "goodput": pytest.approx(0.6),  # 80 steps of 0.75 s in 100 s
        "recovering_share": pytest.approx(0.2),
        "repeating_share": pytest.approx(0.06),
    }
    assert job.shares(100, 2.0)["goodput"] == pytest.approx(0.74)  # what is left
    assert job.report(100, 0.75) == (
        "since the first of 3 starts: 60.0 % steps that count, 20.0 % recovering, 6.0 % steps "
        "taken again"
    )
    assert losses(tmp_path).recovery_seconds == 20.0


def test_the_first_step_of_a_start_is_that_of_its_latest_number(tmp_path):
    record(tmp_path, started(1.0, 1), stepped(5.0, 1, 1), started(9.0, 1))
    assert first_step(tmp_path / NAME, 1) is None
    record(tmp_path, started(1.0, 2), stepped(5.0, 2, 1, 3.5), failed(9.0, 2, 1.0))
    assert first_step(tmp_path / NAME, 2) == (5.0, 3.5)


def test_a_record_that_cannot_be_read_now_says_nothing(tmp_path):
    (tmp_path / NAME).mkdir()  # reading it is an error of the system
    assert first_step(tmp_path / NAME, 1) is None


def test_a_run_writes_when_its_first_step_is_finished_and_reports_its_goodput(
    tmp_path, monkeypatch, capfd
):
    now = time.time()
    record(tmp_path, started(now - 9.0, 1), failed(now - 5.0, 1, 2.0), started(now - 4.0, 2))
    monkeypatch.setenv(START, "2")
    run(tmp_path, quiet=False)
    *_, last = [json.loads(line) for line in (tmp_path / NAME).read_text().splitlines()]
    assert (last["event"], last["start"], last["step"]) == ("stepped", 2, 1)
    assert last["recovery_seconds"] >= 5.0 and last["start_seconds"] >= 4.0
    final = lines(tmp_path)[-1]
    assert 0 < final["goodput"] < final["steps_share"]
    assert final["recovering_share"] > final["repeating_share"] > 0
    assert "since the first of 2 starts: " in capfd.readouterr().out
