"""The time of a job over all its starts: goodput, recoveries, and steps that were taken again."""

import json
import os
import time

import pytest

from meshdsl.training.launching import succession, terms
from meshdsl.training.launching.events import NAME, first_step, losses, repeated_seconds
from meshdsl.training.launching.job_time import START, job_time
from tests.training.launching.test_hosts import free_port
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


def test_a_clock_that_jumps_back_makes_no_time_negative(tmp_path):
    record(tmp_path, started(100.0, 1), failed(150.0, 1, 6.0), started(151.0, 2))
    job = job_time(tmp_path, {START: "2"})
    job.clock = lambda: 90.0
    job.stepped(1)
    last = json.loads((tmp_path / NAME).read_text().splitlines()[-1])
    assert (last["start_seconds"], last["recovery_seconds"], job.recovered) == (0.0, 0.0, 0.0)


def test_steps_that_are_taken_again_are_those_since_the_step_gone_on_from():
    assert repeated_seconds(100.0, 50.0, None, None) == 50.0
    assert repeated_seconds(100.0, 50.0, (60.0, 0.0), None) == 40.0  # it had to start first
    assert repeated_seconds(100.0, 50.0, (60.0, 0.0), (7, 98.0)) == 2.0
    assert repeated_seconds(100.0, 50.0, (160.0, 0.0), (7, 198.0)) == 0.0  # its clock had jumped
    assert repeated_seconds(1100.0, 50.0, (60.0, 0.0), None) == 50.0


def lose_the_first(folder):
    """Has another host lead from now on: the first one was lost at 140 s."""
    agreed = terms.Terms(f"localhost:{free_port()}", 2, "one", 30.0)
    rest = range(1), None, {}, folder, (60.0, 60.0), lambda text: None, 0.0, folder / "copies"
    supervisor = succession.HostSupervisor(terms.Host(agreed, *rest), (5, 60.0))
    made = supervisor._leader(succession.Succession(f"localhost:{free_port()}", 1, 140.0))
    made.launch.crew.close(1)


@pytest.mark.parametrize("told", [False, True])
def test_a_loss_of_the_first_host_counts_the_steps_that_are_taken_again(told, tmp_path):
    """One that has written of the failure itself before it was lost has counted them."""
    record(
        tmp_path,
        *(started(50.0, 1), failed(60.0, 1, 0.0)),  # of an earlier command
        *(started(100.0, 1), stepped(110.0, 1, 1)),
        *([failed(140.0, 1, 30.0)] if told else []),
    )
    lose_the_first(tmp_path)
    found = losses(tmp_path)
    assert (found.failures, found.repeated_seconds) == (2, 30.0)


@pytest.mark.parametrize(
    ("after", "failures"),
    [(["compiled_ahead"], 1), (["renewed"], 0), (["failed", "compiled_ahead"], 1)],
)
def test_a_loss_of_the_first_host_after_its_start_had_ended_counts_once(after, failures, tmp_path):
    rest = [(130.0, kind, {"start": 1, "repeated_seconds": 30.0}) for kind in after]
    record(tmp_path, started(100.0, 1), stepped(110.0, 1, 1), *rest)
    lose_the_first(tmp_path)
    assert losses(tmp_path).failures == failures


def test_a_loss_of_the_first_host_counts_no_steps_that_its_copies_have(tmp_path):
    """Others may hold the rest of a copy, so that one step is taken again."""
    record(tmp_path, started(100.0, 1), stepped(110.0, 1, 1))
    folder = tmp_path / "copies" / "process.1" / "9"
    folder.mkdir(parents=True)
    about = folder / "about.json"
    about.write_text('{"start": [1, "a"], "needs": [[0], [1]]}')
    os.utime(about, (138.0, 138.0))
    lose_the_first(tmp_path)
    assert losses(tmp_path).repeated_seconds == pytest.approx(2.0)
