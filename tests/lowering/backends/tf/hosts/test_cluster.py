"""Many processes on this machine, by TF_CONFIG: one program, and failures that name the missing."""

import json
import os
import socket
import subprocess
import sys
import threading

import numpy as np
import pytest

from meshdsl.lowering.backends.tf.hosts import cluster
from meshdsl.lowering.backends.tf.hosts.cluster import Cluster, join, listens
from meshdsl.optim import AdamW
from meshdsl.training import Data, Recipe, Reporting, train
from tests.training import classifier

STEPS = 4


def free_ports(count):
    """Returns ports that nothing listens on."""
    held = [socket.socket() for _ in range(count)]
    for one in held:
        one.bind(("localhost", 0))
    ports = [one.getsockname()[1] for one in held]
    for one in held:
        one.close()
    return ports


@pytest.fixture
def start():
    """Returns what starts the processes of a cluster, none of which outlive the test."""
    started = []

    def start_all(*args, **kwargs):
        addresses, processes = processes_of(*args, **kwargs)
        started.extend(processes)
        return addresses, processes

    yield start_all
    for process in started:
        process.kill()
        process.communicate()


def processes_of(count, options, own=None, timeout=120, module="worker"):
    """Starts the processes of a cluster; `own` are more options, by process."""
    addresses = [f"localhost:{port}" for port in free_ports(count)]
    found = []
    for index in range(count):
        config = {
            "cluster": {"worker": addresses},
            "task": {"type": "worker", "index": index},
        }
        environment = {
            **os.environ,
            "TF_CONFIG": json.dumps(config),
            "MESHDSL_COLLECTIVE_TIMEOUT": str(timeout),
            "TF_CPP_MIN_LOG_LEVEL": "3",
        }
        told = json.dumps({**options, **(own or {}).get(index, {})})
        found.append(
            subprocess.Popen(
                [sys.executable, "-m", f"tests.lowering.backends.tf.{module}", told],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
        )
    return addresses, found


def result(process, seconds=400):
    out, _ = process.communicate(timeout=seconds)
    return json.loads(out.strip().split("\n")[-1])


@pytest.fixture(scope="module")
def expected():
    recipe = Recipe(classifier.init, classifier.loss, AdamW(0.05))
    data = Data(classifier.endless(), classifier.BATCH_DIMS)
    return train(recipe, data, steps=STEPS, reporting=Reporting(quiet=True)).losses


@pytest.mark.long
@pytest.mark.parametrize(
    "count, mesh, layout",
    [
        (2, "data:2,model:2", "batch:data; hidden:model; params/pixel:data"),
        pytest.param(4, "data:8", "batch:data; optimizer/pixel:data", marks=pytest.mark.slow),
    ],
)
def test_losses_of_several_processes_are_those_of_one(count, mesh, layout, expected, start):
    _, processes = start(count, {"mesh": mesh, "layout": layout, "steps": STEPS})
    for process in processes:
        np.testing.assert_allclose(result(process)["losses"], expected, atol=2e-6)


@pytest.mark.long
def test_programs_find_each_other_whatever_else_a_process_has_built(start):
    _, processes = start(2, {}, module="several_programs")
    for found in map(result, processes):
        rows = np.arange(32.0).reshape(8, 4).sum(1).tolist()
        assert found == {"sum": 28.0, "max": 7.0, "rows": rows, "again": 28.0}


@pytest.mark.long
def test_a_process_that_dies_is_named_with_the_instruction_that_waited_for_it(start):
    options = {"mesh": "data:2,model:2", "layout": "batch:data; hidden:model", "steps": STEPS}
    addresses, (first, second) = start(2, options, {1: {"dies_at": 3}})
    error = result(first)["error"]
    assert second.wait(300) == 9
    assert "a collective has failed" in error
    assert f"devices 2, 3 are missing: process 1 at {addresses[1]} does not answer" in error
    assert "had reached all_reduce over" in error
    assert "TensorFlow says: Collective ops is aborted by: " in error or "RecvAsync" in error


@pytest.mark.slow  # it waits for 40 s
@pytest.mark.parametrize("hangs", [0, 1])
def test_a_process_that_hangs_is_waited_for_no_longer_than_the_timeout(hangs, start):
    options = {"mesh": "data:2", "layout": "batch:data", "steps": STEPS}
    _, processes = start(2, options, {hangs: {"hangs_at": 3}}, timeout=40)
    error = result(processes[1 - hangs])["error"]
    assert processes[hangs].poll() is None
    assert f"device {1 - hangs} had reached all_reduce over data at " in error
    assert f"device {hangs} had not reached it; every process answers" in error


def test_without_a_cluster_a_process_is_alone(monkeypatch):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    assert Cluster.read() == Cluster(("localhost",), 0)
    assert Cluster.read().unreachable() == []
    assert Cluster.read().name("CPU:3") == "/job:localhost/replica:0/task:0/device:CPU:3"


def test_an_address_without_a_port_is_reported():
    with pytest.raises(ValueError, match=r"'10\.0\.0\.2' is no address of a host and its port"):
        listens("10.0.0.2")


def test_processes_that_do_not_answer_are_asked_at_once(monkeypatch):
    """Each waits until all are asked, for none listens to a barrier that not all have reached."""
    asked = threading.Barrier(20, timeout=120)
    monkeypatch.setattr(cluster, "listens", lambda address: asked.wait() < 0)
    found = Cluster(tuple(f"host{n}:1" for n in range(21)), 3).unreachable()
    assert found == [n for n in range(21) if n != 3]


@pytest.mark.parametrize(
    "config, told",
    [
        ("{", "TF_CONFIG cannot be read; it is written"),
        ('{"cluster": {}}', "TF_CONFIG cannot be read; it is written"),
        (
            '{"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": 1}}',
            "TF_CONFIG describes task worker:1 of 1 workers; every process is a worker",
        ),
        (
            '{"cluster": {"worker": ["a:1"], "ps": ["b:1"]}, "task": {"type": "ps", "index": 0}}',
            "TF_CONFIG describes task ps:0 of 1 workers and ps; every process is a worker",
        ),
        (
            '{"cluster": {"worker": ["a:1", "b", ":2"]}, "task": {"type": "worker", "index": 0}}',
            "TF_CONFIG has workers without a host and a port: b, :2; it is written",
        ),
    ],
)
def test_what_cannot_be_a_cluster_is_reported(config, told, monkeypatch):
    monkeypatch.setenv("TF_CONFIG", config)
    with pytest.raises(ValueError) as error:
        Cluster.read()
    assert str(error.value).startswith(told)


@pytest.mark.long
def test_a_process_that_never_starts_is_named(start):
    addresses, (only, other) = start(
        2, {"mesh": "data:2", "layout": "batch:data", "steps": 2}, timeout=4
    )
    other.kill()
    told = result(only)["error"]
    assert told.startswith("process 0 has waited 4 seconds for ")
    assert f"process 1 at {addresses[1]}" in told


def test_a_port_in_use_is_reported(monkeypatch):
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        port = other.getsockname()[1]
        config = {
            "cluster": {"worker": [f"localhost:{port}", "localhost:1"]},
            "task": {"type": "worker", "index": 0},
        }
        monkeypatch.setenv("TF_CONFIG", json.dumps(config))
        with pytest.raises(ValueError, match=f"cannot listen at localhost:{port}: .*in use"):
            join.__wrapped__(1)
