"""Slow processes and devices are named once, by their time against the others' median."""

import os
import subprocess
import sys

import jax
import numpy as np
import pytest

from meshdsl.training import Health
from meshdsl.training.health import stragglers
from meshdsl.training.health.stragglers import ALONE, DeviceTimes, StragglerWatch
from meshdsl.training.reporting.time_shares import TimeShares
from tests.lowering.backends.tf.hosts.test_cluster import free_ports
from tests.training.test_resume import lines, run

JOB = {"backend": "jax", "mesh": "data:8", "layout": "batch:data"}


def look(data=0.0, steps=1.0, devices=(0.02,), host="host0"):
    """Returns the look of a process whose devices wait `data` seconds per step."""
    return {"host": host, "data": data, "steps": steps, "devices": dict(enumerate(devices))}


def watch(factor=1.5, steps=20):
    said = []
    return StragglerWatch(factor, steps, TimeShares(), says=said.append), said


def test_a_process_that_waits_for_data_is_named_with_its_time_against_the_median():
    """The others' steps take as long, for they wait for it."""
    one, said = watch()
    looks = [look(0.0, 3.0), look(2.0, 1.0, host="host1"), look(0.1, 2.9), look(0.2, 2.8)]
    for step in (10, 25, 30, 60):
        one.compare(step, looks)
    assert said == [
        "process 1 on host1 is slow: a step takes it 3 s, the others 1.1 s (median), as "
        "its devices wait for data, at every look from step 10 to 30; all wait for it"
    ]
    assert one.metrics == {"slowest_process": 1.0, "slowest_ratio": pytest.approx(3 / 1.1)}


def test_a_device_is_named_with_its_process():
    one, said = watch()
    looks = [look(devices=(0.02, 0.021)), look(devices=(0.019, 0.05), host="b")]
    for step in (10, 30):
        one.compare(step, looks)
    assert said == [
        "device 1 of process 1 on b is slow: it takes 50 ms for a product of matrices, the others "
        "20 ms (median), at every look from step 10 to 30; all wait for it"
    ]


def test_a_look_at_which_it_is_as_fast_as_the_others_begins_the_count_anew():
    one, said = watch()
    slow, fast = [look(), look(5.0)], [look(), look()]
    for step in (10, 29):
        one.compare(step, slow)
    one.compare(30, fast)
    for step in (31, 50):
        one.compare(step, slow)
    assert said == []
    one.compare(51, slow)
    one.compare(55, slow)
    one.compare(60, fast)
    assert [line.partition(" on ")[0].partition(" is ")[0] for line in said] == ["process 1"] * 2
    assert said[1] == "process 1 is as fast as the others again, at step 60"


def test_nobody_is_slow_among_equals_or_alone():
    one, said = watch(steps=1)
    for step in range(1, 9):
        one.compare(step, [look(), look(0.3), look(0.2)])
    assert said == [] and one.metrics["slowest_ratio"] < 1.5
    alone, said = watch(steps=1)
    alone.compare(1, [look(9.0)])
    assert said == [] and alone.metrics == {}


def test_times_are_those_since_the_last_look_per_step():
    now = [0.0]
    shares = TimeShares(lambda: now[0])
    one = StragglerWatch(1.5, 20, shares, lambda: {3: 0.01})
    now[0] = 5.0
    shares.begin_steps()
    one.begin(4)
    for step, seconds, data in ((8, 4.0, 1.0), (10, 8.0, 6.0)):
        now[0] += seconds
        shares.add("data", data)
        found = one.look(step)
        taken = 4 if step == 8 else 2
        assert (found["steps"], found["data"]) == ((seconds - data) / taken, data / taken)
        assert found["devices"] == {"3": 0.01}


def test_every_device_of_the_process_is_measured():
    times = DeviceTimes()
    for _ in range(2):
        found = times()
        assert [*found] == [device.id for device in jax.local_devices()]
        assert all(seconds > 0 for seconds in found.values())


def test_a_run_names_a_slow_device(tmp_path, monkeypatch, capfd):
    times = {number: 0.1 if number == 5 else 0.01 for number in range(8)}
    monkeypatch.setattr(stragglers, "SECONDS", 0.0)
    monkeypatch.setattr(DeviceTimes, "__call__", lambda self: times)
    watched = run(tmp_path, straggler_factor=2.0, straggler_steps=3, **JOB)
    np.testing.assert_allclose(watched.losses, run().losses, atol=2e-6)
    (told,) = [line for line in capfd.readouterr().err.splitlines() if "is slow" in line]
    assert told.startswith("meshdsl train: device 5 of process 0 on ")
    assert "at every look from step 1 to 4" in told
    last = lines(tmp_path)[-1]
    assert (last["slowest_process"], last["slowest_ratio"]) == (0, pytest.approx(10))


def test_what_cannot_be_compared_is_told(monkeypatch):
    with pytest.raises(ValueError, match="straggler_factor compares the devices of JAX"):
        run(straggler_factor=2.0)
    with pytest.raises(ValueError, match="must be above 1, got 1: "):
        Health(straggler_factor=1)
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    with pytest.warns(UserWarning, match=ALONE[:60]):
        run(straggler_factor=2.0, backend="jax", steps=2)


@pytest.mark.slow
def test_of_two_processes_the_one_whose_data_is_slow_is_named_once():
    (port,) = free_ports(1)
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    environment.pop("XLA_FLAGS", None)
    line = [sys.executable, "-m", "tests.training.health.slow_job", f"localhost:{port}"]
    pipe = subprocess.PIPE
    jobs = [
        subprocess.Popen([*line, str(n)], env=environment, stdout=pipe, stderr=pipe, text=True)
        for n in range(2)
    ]
    told = [job.communicate(timeout=300)[1] for job in jobs]
    assert [job.returncode for job in jobs] == [0, 0], told
    (slow,) = [line for line in told[0].splitlines() if "is slow" in line]
    assert slow.startswith("meshdsl train: process 1 on ") and "wait for data" in slow
    assert "is slow" not in told[1]
