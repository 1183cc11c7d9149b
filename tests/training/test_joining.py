"""What a process does when it cannot join a job, or when the others are gone."""

import os
import socket
import subprocess
import sys
import threading

import jax
import pytest

from meshdsl.training.processes import joining as processes
from meshdsl.training.processes import watching
from meshdsl.training.processes.watching import JobProcesses, Watch
from tests.lowering.backends.tf.hosts.test_cluster import free_ports
from tests.training.processes.test_watching import until


@pytest.fixture
def neighbour(monkeypatch):
    """Returns a job in which another process listens, and what would end this process."""
    reasons = []
    monkeypatch.setattr(processes, "_end", reasons.append)
    for name, value in {"_SECONDS": 0.1, "_EVERY": 0.05, "_GRACE": 0.1}.items():
        monkeypatch.setattr(watching, name, value)
    with socket.create_server(("localhost", 0)) as other:
        port = other.getsockname()[1]

        def made(own, *_):
            job = JobProcesses(
                0, (("localhost",),) * 2, (own.getsockname()[1], port), own, watched=(1,)
            )
            threading.Thread(target=job.answer, daemon=True).start()
            return job

        yield made, other, reasons


def test_a_process_that_cannot_join_goes_on_when_the_others_end(neighbour, monkeypatch):
    made, other, reasons = neighbour
    listening = []

    def fails(*_, **__):
        raise RuntimeError("DEADLINE_EXCEEDED: nobody came")

    monkeypatch.setattr(jax.config, "update", lambda *_: None)
    monkeypatch.setattr(jax.distributed, "initialize", fails)
    monkeypatch.setattr(processes, "_job", lambda own, *_: listening.append(own) or made(own))
    before = threading.active_count()
    with pytest.raises(ValueError, match=r"cannot join .* by coordinator localhost:1: DEADLINE"):
        processes.join("localhost:1", 2, 0)
    other.close()
    until(lambda: threading.active_count() <= before)  # neither watches nor answers
    assert not reasons and listening[0].fileno() == -1


JOINING_TWICE = """
import sys
import jax
from meshdsl.training.processes.joining import join, joined

connect = jax.distributed.initialize

def fails(*arguments, **options):
    connect(*arguments, **options)
    raise RuntimeError("UNAVAILABLE: lost")

where = sys.argv[1], 1, 0
jax.distributed.initialize = fails
try:
    join(*where)
except ValueError as error:
    print(error)
jax.distributed.initialize = connect
with joined(*where):
    print(jax.device_count())
    try:
        join(*where)
    except ValueError as error:
        print(error)
"""


def test_a_process_joins_again_after_a_connection_that_failed_but_not_twice():
    (port,) = free_ports(1)
    line = [sys.executable, "-c", JOINING_TWICE, f"localhost:{port}"]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    done = subprocess.run(line, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    failed, devices, twice = done.stdout.splitlines()
    assert failed.endswith(f"by coordinator localhost:{port}: UNAVAILABLE: lost")
    assert devices == "1"
    assert twice.startswith("this process has joined a job already, and is in one at a time")


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        ("Gloo context initialization failed: [gloo/tcp/pair.h:311] Connect timeout [none]", True),
        ("Gloo all-reduce failed: [gloo/tcp/pair.cc:553] Connection closed by peer", True),
        ("Gloo all-reduce failed: [gloo/tcp/pair.cc:553] Read timed out", True),
        ("Gloo all-reduce failed: unsupported data type", False),
        ("RESOURCE_EXHAUSTED: out of memory", False),
    ],
)
def test_a_lost_connection_to_one_that_answers_is_explained(neighbour, error, lost):
    made, other, _ = neighbour
    answering = JobProcesses(1, (), (), other)
    threading.Thread(target=answering.answer, daemon=True).start()
    job = made(socket.create_server(("localhost", 0)))
    watch = Watch(job, 60, threading.Event(), print)
    until(lambda: not job.absent([1]))
    reason = processes._deserted(watch, RuntimeError(f"UNKNOWN: {error}"))
    if lost:
        assert "lost the connection to another process" in reason and reason.endswith(error)
        assert socket.gethostname() in reason
    else:
        assert reason is None
    answering.close()
    job.close()


@pytest.mark.parametrize("crashed", [False, True])
def test_an_error_of_jax_is_due_to_others_that_are_gone(neighbour, crashed):
    made, other, _ = neighbour
    own = socket.create_server(("localhost", 0))
    job, error = made(own), RuntimeError("UNAVAILABLE: connection closed")
    if not crashed:  # a host that has crashed does not answer; one that is there refuses
        other.close()
    watch = Watch(job, 60, threading.Event(), print)
    reason = processes._deserted(watch, error)
    what = "has ended or cannot be reached" if crashed else "has ended"
    assert reason.startswith(f"process 1 on localhost of the job {what}, and the others cannot")
    assert ("UNAVAILABLE" in reason) == crashed
    if crashed:
        threading.Thread(target=JobProcesses(1, (), (), other).answer, daemon=True).start()
        until(lambda: processes._deserted(watch, error) is None)
        JobProcesses(1, (), (), other).close()
    job.close()
